//! The cycle: prefill, draft, verify, accept, stop.
