//! What a person or a script calls: one file per command.
