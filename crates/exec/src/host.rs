//! What this process may use of its machine.

/// Number of cores that this process may use. The system is asked once: it reads files for that.
pub fn cores() -> usize {
    static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *CORES.get_or_init(|| std::thread::available_parallelism().map_or(1, |n| n.get()))
}

/// Bytes that this process can still allocate, as far as the system tells.
pub fn available_bytes() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let machine = line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024;
    let group = number("/sys/fs/cgroup/memory.max").zip(number("/sys/fs/cgroup/memory.current"));
    Some(group.map_or(machine, |(most, used)| machine.min(most.saturating_sub(used))))
}
