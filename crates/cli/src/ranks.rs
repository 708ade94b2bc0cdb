//! Who generates or evaluates: this process alone, or tensor-parallel ranks that share the model. On the CPU ranks are threads, on GPUs processes with a GPU each,
//! started here or by mpirun, srun or torchrun.

use crate::failure::{Failure, Result};
use crate::launch;
use crate::processes::{self, ProcessPlace};
use lockstep_config::Config;
use lockstep_exec::comm::processes::Waiting;
use lockstep_host::{Devices, Processes};
use lockstep_ir::{Layout, Mesh, MeshAxis};
use lockstep_plan::Target;
use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

/// The ranks that share a model.
#[derive(clap::Args)]
pub struct RankArgs {
    /// Tensor-parallel ranks that share the model and its cache: on GPUs processes with a GPU each, which this command starts where mpirun, srun or torchrun has not;
    /// on a CPU threads.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=4096))]
    tp: u32,
    /// With --tp: let processes share GPUs where there are fewer, to try it, slowly.
    #[arg(long, requires = "tp")]
    share_gpus: bool,
}

impl RankArgs {
    /// Tensor-parallel ranks.
    pub fn tp(&self) -> usize {
        self.tp as usize
    }

    /// Where this process stands among those that were started together, if it shares the model with them.
    pub fn place(&self) -> Result<Option<ProcessPlace>> {
        if self.tp == 1 {
            return Ok(None);
        }
        let place = processes::place()?;
        if let Some(place) = place.as_ref().filter(|place| place.ranks != self.tp()) {
            let text = format!("--tp {}, and {} processes were started", self.tp, place.ranks);
            return Err(Failure::request(text, format!("start {} processes, or pass --tp {}", self.tp, place.ranks)));
        }
        Ok(place)
    }

    /// Starts this command again, once for each rank, where a model runs on GPUs; `None` where it runs in this process.
    pub fn start(&self, config: &Config, place: Option<&ProcessPlace>) -> Result<Option<ExitCode>> {
        let on_gpus = || matches!(Target::of(&Devices::of(config), config), Target::Cuda { .. });
        if self.tp == 1 || place.is_some() || !on_gpus() {
            return Ok(None);
        }
        launch::require_gpus(self.tp(), config.train.gpu, self.share_gpus)?;
        let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
        launch::run_ranks(&arguments, self.tp(), self.share_gpus).map(Some)
    }

    /// The devices of a config, over all processes where there are several.
    pub fn devices(&self, config: &Config, place: Option<&ProcessPlace>) -> Result<Devices> {
        let Some(place) = place else { return Ok(Devices::of(config)) };
        let layout = Layout { mesh: Mesh::ONE.with(MeshAxis::Tp, self.tp()), ..Layout::single(1) };
        let timeout = Duration::from_secs_f64(config.parallel.timeout);
        let start = place.start(timeout, None, Waiting::default())?;
        let devices = Devices::of_processes(Processes::join(&start, &config.at(&layout), place.local)?);
        let given: Vec<(String, String)> =
            std::env::args().skip(1).enumerate().map(|(i, word)| (format!("argument {}", i + 1), word)).collect();
        devices.group().agree_on_start(config, &given)?;
        Ok(devices)
    }
}
