//! Energy that a device takes: by its counter, or by its power over time where it has none.

use crate::Nvml;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Where a device's energy is read.
pub(crate) struct Energy {
    nvml: Option<Arc<Nvml>>,
    source: OnceLock<Source>,
}

enum Source {
    Counter,
    /// Joules so far; nothing once the device has told no power.
    Integral(Arc<Mutex<Option<f64>>>),
    Untold,
}

/// How often the power is read of a device without a counter.
const SAMPLE_EVERY: Duration = Duration::from_millis(100);

impl Energy {
    pub(crate) fn new(nvml: Option<Arc<Nvml>>) -> Self {
        Self { nvml, source: OnceLock::new() }
    }

    /// Joules since some moment; nothing where the device does not tell.
    pub(crate) fn joules(&self) -> Option<f64> {
        let nvml = self.nvml.as_ref()?;
        match self.source.get_or_init(|| Source::of(nvml)) {
            Source::Counter => nvml.energy_j(),
            Source::Integral(joules) => *joules.lock().unwrap_or_else(PoisonError::into_inner),
            Source::Untold => None,
        }
    }
}

impl Source {
    fn of(nvml: &Arc<Nvml>) -> Self {
        match (nvml.energy_j(), nvml.power_w()) {
            (Some(_), _) => Self::Counter,
            (None, None) => Self::Untold,
            (None, Some(watts)) => {
                let joules = Arc::new(Mutex::new(Some(0.0)));
                let (nvml, kept) = (nvml.clone(), Arc::downgrade(&joules));
                let thread = std::thread::Builder::new().name("lockstep-power".into());
                match thread.spawn(move || integrate(&nvml, &kept, watts)) {
                    Ok(_) => Self::Integral(joules),
                    Err(_) => Self::Untold,
                }
            }
        }
    }
}

/// Adds up power over time until nobody reads the sum any more.
fn integrate(nvml: &Nvml, sum: &Weak<Mutex<Option<f64>>>, mut before: f64) {
    let mut at = Instant::now();
    loop {
        std::thread::sleep(SAMPLE_EVERY);
        let Some(sum) = sum.upgrade() else { return };
        let (now, watts) = (Instant::now(), nvml.power_w());
        let mut sum = sum.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(watts) = watts else {
            // What comes later would be too little.
            *sum = None;
            return;
        };
        *sum = sum.map(|joules| joules + (now - at).as_secs_f64() * (before + watts) / 2.0);
        (at, before) = (now, watts);
    }
}
