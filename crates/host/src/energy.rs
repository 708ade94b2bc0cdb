//! Energy that this process answers for: that of its GPU, by NVML, and that of its host's CPUs, by RAPL.
//!
//! Every GPU and every host is counted once: by the first of the ranks that have it. What cannot be read is not known, and never 0.

use crate::devices::Devices;
use crate::processes::Processes;
use lockstep_cuda::Gpu;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Joules since some moment, by what takes them; NaN where that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Joules {
    /// By GPUs.
    pub gpu: f64,
    /// By CPUs and their memory.
    pub cpu: f64,
}

/// What a process reads.
pub struct EnergyMeter {
    gpu: Part<Arc<Gpu>>,
    cpu: Part<Rapl>,
}

/// Something that takes energy.
enum Part<T> {
    /// It counts here.
    Here(T),
    /// Another process counts it.
    Elsewhere,
    /// There is none, or it cannot be read.
    Unknown,
}

impl EnergyMeter {
    /// Of what this process trains on. `gpu` is its GPU, where it has one.
    pub(crate) fn new(gpu: Option<Arc<Gpu>>, processes: Option<&Processes>) -> Self {
        let shared = processes.and_then(Processes::gpu).is_some_and(|gpu| gpu.shared);
        let gpu = match gpu {
            Some(_) if shared => Part::Elsewhere,
            Some(gpu) => Part::Here(gpu),
            None => Part::Unknown,
        };
        let cpu = match processes.is_none_or(Processes::is_first_of_host) {
            true => Rapl::open(&powercap()).map_or(Part::Unknown, Part::Here),
            false => Part::Elsewhere,
        };
        Self { gpu, cpu }
    }

    /// Reads all of it.
    pub fn read(&mut self) -> Joules {
        let gpu = match &self.gpu {
            Part::Here(gpu) => gpu.energy_j().unwrap_or(f64::NAN),
            Part::Elsewhere => 0.0,
            Part::Unknown => f64::NAN,
        };
        let cpu = match &mut self.cpu {
            Part::Here(rapl) => rapl.joules().unwrap_or(f64::NAN),
            Part::Elsewhere => 0.0,
            Part::Unknown => f64::NAN,
        };
        Joules { gpu, cpu }
    }
}

impl Devices {
    /// What tells the energy that training takes on this device.
    pub fn energy_meter(&self, target: lockstep_plan::Target) -> crate::Result<EnergyMeter> {
        let gpu = match target {
            lockstep_plan::Target::Cpu => None,
            lockstep_plan::Target::Cuda { .. } => Some(self.gpu()?),
        };
        Ok(EnergyMeter::new(gpu, self.group().0))
    }
}

/// The variable that names the folder of RAPL's zones where it is not the usual one: containers hide that.
const POWERCAP: &str = "LOCKSTEP_POWERCAP";

fn powercap() -> PathBuf {
    std::env::var_os(POWERCAP)
        .filter(|path| !path.is_empty())
        .map_or_else(|| "/sys/class/powercap".into(), PathBuf::from)
}

/// The counters of all packages of a host and of memory that is not part of one.
struct Rapl {
    zones: Vec<Zone>,
}

/// A counter of microjoules, which begins anew at 0 when it has come to its end.
struct Zone {
    counter: PathBuf,
    range: u64,
    last: u64,
    /// Microjoules since it was opened.
    sum: u64,
}

impl Rapl {
    /// Opens the zones below a folder; nothing where there are none, or one cannot be read.
    fn open(powercap: &Path) -> Option<Self> {
        let mut zones = Vec::new();
        for entry in std::fs::read_dir(powercap).ok()? {
            let path = entry.ok()?.path();
            // `intel-rapl:0` is a package, AMD's too, and `intel-rapl:0:1` a part of it; `intel-rapl-mmio:0` is the same package again.
            if !path.file_name()?.to_str().is_some_and(|name| name.starts_with("intel-rapl:")) {
                continue;
            }
            let name = std::fs::read_to_string(path.join("name")).ok()?;
            // Cores and graphics are in the package, and `psys` has all of it once more.
            if name.starts_with("package") || name.trim() == "dram" {
                zones.push(Zone::open(&path)?);
            }
        }
        (!zones.is_empty()).then_some(Self { zones })
    }

    /// Joules since it was opened.
    fn joules(&mut self) -> Option<f64> {
        let mut sum = 0;
        for zone in &mut self.zones {
            sum += zone.follow()?;
        }
        Some(sum as f64 * 1e-6)
    }
}

impl Zone {
    fn open(path: &Path) -> Option<Self> {
        let counter = path.join("energy_uj");
        Some(Self { range: number(&path.join("max_energy_range_uj"))?, last: number(&counter)?, sum: 0, counter })
    }

    fn follow(&mut self) -> Option<u64> {
        let now = number(&self.counter)?;
        self.sum += if now >= self.last { now - self.last } else { self.range.saturating_sub(self.last) + now };
        self.last = now;
        Some(self.sum)
    }
}

fn number(path: &Path) -> Option<u64> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn zone(folder: &Path, zone: &str, name: &str, energy_uj: u64) {
        let zone = folder.join(zone);
        std::fs::create_dir_all(&zone).unwrap();
        std::fs::write(zone.join("name"), format!("{name}\n")).unwrap();
        std::fs::write(zone.join("max_energy_range_uj"), "10000000\n").unwrap();
        std::fs::write(zone.join("energy_uj"), format!("{energy_uj}\n")).unwrap();
    }

    #[test]
    fn packages_and_memory_are_added_and_counters_that_begin_anew_go_on() {
        let folder = tempfile::tempdir().unwrap();
        let set = |packages: [u64; 2], dram: u64| {
            zone(folder.path(), "intel-rapl:0", "package-0", packages[0]);
            zone(folder.path(), "intel-rapl:1", "package-1", packages[1]);
            zone(folder.path(), "intel-rapl:0:0", "core", 77 * dram);
            zone(folder.path(), "intel-rapl:0:1", "dram", dram);
            zone(folder.path(), "intel-rapl:2", "psys", 99 * dram);
            zone(folder.path(), "intel-rapl-mmio:0", "package-0", packages[0]);
        };
        set([5_000_000, 9_000_000], 1_000_000);
        let mut rapl = Rapl::open(folder.path()).unwrap();
        assert_eq!(rapl.joules(), Some(0.0));
        set([6_000_000, 500_000], 1_250_000);
        // 1 J, 1 J to the end of the counter and 0.5 J after it, 0.25 J.
        assert_eq!(rapl.joules(), Some(2.75));
        set([6_000_000, 1_500_000], 1_250_000);
        assert_eq!(rapl.joules(), Some(3.75));
        // A zone that is gone is not taken for 0.
        std::fs::remove_file(folder.path().join("intel-rapl:1/energy_uj")).unwrap();
        assert_eq!(rapl.joules(), None);
        assert!(Rapl::open(folder.path()).is_none());
    }

    #[test]
    fn nothing_is_read_where_there_is_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(Rapl::open(folder.path()).is_none() && Rapl::open(&folder.path().join("none")).is_none());
        zone(folder.path(), "intel-rapl:0", "psys", 5);
        assert!(Rapl::open(folder.path()).is_none());
    }
}
