//! Data files to batches, through the public interface.

mod batches;
mod forms;
mod hostile;
mod packing;
mod toy;
