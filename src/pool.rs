//! The pool: blocks in segments, and its whole state as a value that can be kept and returned to.
