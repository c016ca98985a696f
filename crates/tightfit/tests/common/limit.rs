//! A limit of the system on this process's memory.

/// Lets the process have that many bytes of private memory, `u64::MAX` for any number.
pub fn limit_memory(bytes: u64) {
    let limit = libc::rlimit {
        rlim_cur: bytes,
        rlim_max: libc::RLIM_INFINITY,
    };
    // SAFETY: the struct is initialised, and lives as long as the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_DATA, &limit) }, 0);
}
