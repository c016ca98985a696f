//! From data files to fixed rows of tokens, and from rows to batches.
//!
//! [`prepare`] streams files through buffers of a fixed size, encodes each sample, cuts it into pieces that fit a row, packs the
//! pieces into rows and writes the rows to two token files: one to train on, one held out. [`Rows`] reads such a file, and
//! [`Batches`] is the numbered sequence of micro-batches made of it: each is a function of the seed and its number alone, so
//! resuming needs no state but a number.
//!
//! # What a file holds
//! `.txt`, `.text`, `.md`: one document, UTF-8. `\r\n` is read as `\n`.
//!
//! `.jsonl`: one JSON object per line. Blank lines are passed over, other keys are ignored, `null` is as good as absent.
//!
//! | keys | read as | loss on |
//! |---|---|---|
//! | `text` | a document | all of it |
//! | `prompt`, `completion` | the one followed by the other | the completion |
//! | `instruction`, `output`, perhaps `input` | a user's message (instruction, blank line, input) and the assistant's answer, in the chat template; where there is none, the parts with a blank line after each | the output |
//! | `messages`: objects with `role` and `content` | the chat template | the assistant's answers |
//!
//! Documents and completions end with the tokenizer's end of sequence, where it has one; a chat template writes its own ends.
//!
//! # Rows
//! A row of `seq` tokens is stored as `seq + 1` entries, since the last token needs a target too. Pieces lie in it one after
//! the other; each attends to itself only and counts its positions from 0. What is left over is padding. No sample, however
//! long, makes a row longer.

mod batches;
mod cut;
mod encoder;
mod entry;
mod error;
mod files;
mod json;
mod lines;
mod options;
mod pack;
mod permutation;
mod pieces;
mod prepare;
mod rows;
mod split;
mod text;

pub use batches::{BatchBuffers, Batches, IGNORE_INDEX};
pub use encoder::{EncodeError, Encoder, Message, Segment};
pub use entry::MAX_VOCAB_SIZE;
pub use error::{DataError, RowsError};
pub use lines::MAX_LINE_BYTES;
pub use options::{Counts, Long, Options, Prepared, Progress, TokenFiles};
pub use prepare::prepare;
pub use rows::Rows;
