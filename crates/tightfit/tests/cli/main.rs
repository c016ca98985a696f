//! The command as a user meets it: flags and files, what it prints where, exit codes, and every way to stop it.

#[cfg(target_os = "linux")]
mod adapters;
#[cfg(target_os = "linux")]
mod batches;
mod calibrate;
mod files;
mod mix;
mod plan;
#[cfg(target_os = "linux")]
mod pretrained;
#[cfg(target_os = "linux")]
mod quantize;
#[cfg(target_os = "linux")]
mod resume;
mod settings;
#[cfg(target_os = "linux")]
mod stop;
#[cfg(target_os = "linux")]
mod streams;
#[cfg(target_os = "linux")]
mod techniques;
mod util;
