//! The only place with unsafe driver calls.
