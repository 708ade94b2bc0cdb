//! `--budget`: what some compute is best spent on, by published scaling laws, and how large its batch may be, by the noise scale of a
//! run.

use crate::failure::{Failure, Result};
use crate::table::{table, wrapped};
use crate::{Format, hardware};
use lockstep_config::{Config, presets};
use lockstep_ir::units::{self, thousands};
use lockstep_plan::laws::{BESIROGLU_2024, CHINCHILLA_APPROACH_2, ModelAndTokens, PowerLaw, RampStep, batch_ramp};
use lockstep_plan::parameters;
use lockstep_rundir::{lines, read_config};
use lockstep_sim::Hardware;
use lockstep_train::StepMetrics;
use serde_json::{Value, json};
use std::path::Path;

/// Tokens per parameter of the choices that are shown beside the best.
const RATIOS: [f64; 4] = [20.0, 100.0, 200.0, 1000.0];

/// MFU where none is given.
const USUAL_MFU: f64 = 0.4;

/// The share of the peak that model FLOPs reach.
#[derive(Clone, Copy)]
pub(super) enum Mfu {
    Given(f64),
    /// That the recipe of a config comes to.
    Recipe(f64),
}

/// A budget: FLOPs, and what they are made of.
pub(super) struct Budget {
    text: String,
    flops: f64,
    gpu_hours: Option<GpuHours>,
}

struct GpuHours {
    hours: f64,
    gpu: String,
    peak: f64,
    mfu: f64,
    mfu_from: &'static str,
    unverified: Vec<String>,
}

impl Budget {
    /// From its text: `2M GPU-hours`, `30K GPU-days` or `1e24 FLOPs`.
    pub(super) fn parse(text: &str, mfu: Option<Mfu>, hardware: Option<&Hardware>) -> Result<Self> {
        let usual = "write a number and its unit, such as \"2M GPU-hours\", \"500 GPU-days\" or \"1e24 FLOPs\"";
        let (number, unit) = text.trim().rsplit_once(' ').unwrap_or((text, ""));
        let value = number_of(number).filter(|x| *x > 0.0 && x.is_finite());
        let value = value.ok_or_else(|| Failure::request(format!("--budget {text} is no amount"), usual))?;
        let hours = match unit.to_lowercase().as_str() {
            "gpu-hours" | "gpu-hour" | "gpuh" => value,
            "gpu-days" | "gpu-day" => 24.0 * value,
            "flop" | "flops" => return Ok(Self { text: text.to_owned(), flops: value, gpu_hours: None }),
            _ => return Err(Failure::request(format!("--budget {text}: {unit:?} is no unit of compute"), usual)),
        };
        let Some(Hardware { gpu, .. }) = hardware else {
            return Err(Failure::request("--budget in GPU-hours needs to know of which GPU", "add --cluster or --gpu"));
        };
        let (used, mfu_from) = match mfu {
            Some(Mfu::Given(mfu)) => (hardware::mfu(mfu)?, "given"),
            Some(Mfu::Recipe(mfu)) => (mfu, "predicted for the recipe of the config"),
            None => (USUAL_MFU, "assumed: give --mfu, or a config"),
        };
        let peak = gpu.peak_flops_per_s;
        let gpu_hours = GpuHours {
            hours,
            gpu: hardware.map(hardware::label).unwrap_or_default(),
            peak,
            mfu: used,
            mfu_from,
            unverified: hardware.map(Hardware::unverified).unwrap_or_default(),
        };
        Ok(Self { text: text.to_owned(), flops: hours * 3600.0 * peak * used, gpu_hours: Some(gpu_hours) })
    }

    pub(super) fn show(&self, run: Option<&Path>, format: Format) -> Result<()> {
        let sizes = preset_sizes()?;
        let best = [
            ("Chinchilla approach 2", CHINCHILLA_APPROACH_2.best(self.flops)),
            ("approach 3, 2024 refit", BESIROGLU_2024.best(self.flops)),
        ];
        let tokens = best[1].1.tokens;
        let noise = run.map(|dir| NoiseReport::read(dir, tokens as u64)).transpose()?;
        format.print(|| self.as_json(&best, &sizes, noise.as_ref()), || self.as_text(&best, &sizes, noise.as_ref()))
    }

    /// What is compared: the best, over-trained models, and presets near them.
    fn choices(&self, best: &[(&str, ModelAndTokens)]) -> Vec<(String, ModelAndTokens)> {
        let mut all: Vec<(String, ModelAndTokens)> =
            best.iter().map(|(name, choice)| ((*name).to_owned(), *choice)).collect();
        let over =
            |ratio: &f64| (format!("{ratio} tokens per parameter"), ModelAndTokens::at_ratio(self.flops, *ratio));
        all.extend(RATIOS.iter().map(over));
        all
    }

    fn as_json(
        &self,
        best: &[(&str, ModelAndTokens)],
        sizes: &[(&'static str, u64)],
        noise: Option<&NoiseReport>,
    ) -> Value {
        let least = BESIROGLU_2024.loss(best[1].1);
        let row = |(name, choice): (String, ModelAndTokens)| {
            let (preset, parameters) = nearest(sizes, choice.parameters);
            json!({
                "choice": name,
                "parameters": choice.parameters,
                "tokens": choice.tokens,
                "tokens_per_parameter": choice.ratio(),
                "loss": BESIROGLU_2024.loss(choice),
                "loss_above_best": BESIROGLU_2024.loss(choice) - least,
                "inference_flops_per_token": 2.0 * choice.parameters,
                "nearest_preset": preset,
                "nearest_preset_parameters": parameters,
            })
        };
        json!({
            "budget": self.text,
            "flops": self.flops,
            "gpu_hours": self.gpu_hours.as_ref().map(|g| json!({
                "hours": g.hours, "gpu": g.gpu, "peak_flops_per_s": g.peak, "mfu": g.mfu, "mfu_from": g.mfu_from,
                "unverified": g.unverified,
            })),
            "laws": { "approach_2": CHINCHILLA_APPROACH_2, "approach_3_refit": BESIROGLU_2024 },
            "choices": self.choices(best).into_iter().map(row).collect::<Vec<_>>(),
            "noise": noise.map(NoiseReport::as_json),
        })
    }

    fn as_text(
        &self,
        best: &[(&str, ModelAndTokens)],
        sizes: &[(&'static str, u64)],
        noise: Option<&NoiseReport>,
    ) -> String {
        let mut text = wrapped(&format!("budget: {} = {:.2e} FLOPs of the model", self.text, self.flops), "  ");
        if let Some(g) = &self.gpu_hours {
            let (mfu, from, peak) = (g.mfu, g.mfu_from, units::flops(g.peak));
            let line = format!("  {} at MFU {mfu:.3} ({from}) of {peak}/s (16 bit)", g.gpu);
            text.push_str(&wrapped(&line, "    "));
        }
        let least = BESIROGLU_2024.loss(best[1].1);
        let row = |(name, choice): (String, ModelAndTokens)| {
            vec![
                name,
                units::count(choice.parameters as u64),
                units::count(choice.tokens as u64),
                format!("{:.1}", choice.ratio()),
                format!("{:.3}", BESIROGLU_2024.loss(choice)),
                format!("{:+.3}", BESIROGLU_2024.loss(choice) - least),
                nearest(sizes, choice.parameters).0.to_owned(),
            ]
        };
        let rows: Vec<_> = self.choices(best).into_iter().map(row).collect();
        let header = ["", "parameters", "tokens", "~tokens per parameter", "loss", "above the least", "nearest preset"];
        text.push_str(&format!("\nwhat it buys, at 6 FLOPs per parameter and token\n{}", table(&header, &rows)));
        let (two, three) = (CHINCHILLA_APPROACH_2, BESIROGLU_2024);
        for line in [
            format!(
                "approach 2 (Hoffmann et al. 2022): parameters = {:.0e} · (FLOPs / {:.2e})^{}",
                two.parameters, two.flops, two.exponent
            ),
            format!(
                "approach 3, refit (Besiroglu et al. 2024): loss = {} + {} / parameters^{} + {} / tokens^{}, in nats per token of \
                 their data",
                three.irreducible, three.parameters, three.parameters_exponent, three.tokens, three.tokens_exponent
            ),
            "a smaller model that sees more tokens costs loss, and saves as much of every token that it generates as it is \
             smaller"
                .to_owned(),
        ] {
            text.push_str(&wrapped(&format!("  {line}"), "    "));
        }
        if let Some(noise) = noise {
            text.push_str(&noise.as_text());
        }
        text + &self.gpu_hours.as_ref().map_or(String::new(), |g| hardware::unverified(&g.unverified))
    }
}

/// A number with a decimal suffix or an exponent: `2M`, `1.5K`, `1e24`.
fn number_of(text: &str) -> Option<f64> {
    let text = text.trim();
    let suffixes = [("K", 1e3), ("M", 1e6), ("B", 1e9), ("T", 1e12)];
    let (digits, times) =
        suffixes.iter().find_map(|(s, times)| Some((text.strip_suffix(s)?, *times))).unwrap_or((text, 1.0));
    digits.trim().parse::<f64>().ok().map(|x| x * times)
}

/// Every preset with its parameters.
fn preset_sizes() -> Result<Vec<(&'static str, u64)>> {
    let mut all = Vec::new();
    for name in presets() {
        let config = Config::parse(&format!("[model]\npreset = \"{name}\"\n"), "preset", &[])?;
        all.push((name, parameters(&config)?));
    }
    Ok(all)
}

/// The preset whose size is nearest by ratio.
fn nearest(sizes: &[(&'static str, u64)], wanted: f64) -> (&'static str, u64) {
    let far = |n: u64| (n as f64 / wanted).ln().abs();
    sizes.iter().copied().min_by(|a, b| far(a.1).total_cmp(&far(b.1))).unwrap_or(("", 0))
}

/// What a run measured of its gradients' noise.
struct NoiseReport {
    /// Sequences of a step at the end, and tokens of one.
    global_batch: usize,
    seq: usize,
    last: f64,
    over_tokens: PowerLaw,
    over_loss: Option<PowerLaw>,
    /// Tokens that the ramp is for.
    tokens: u64,
    ramp: Vec<RampStep>,
}

impl NoiseReport {
    fn read(dir: &Path, tokens: u64) -> Result<Self> {
        let request = |what: &str, hint: &str| Failure::request(format!("--run {}: {what}", dir.display()), hint);
        let config = read_config(&dir.join("run.toml"))
            .map_err(|_| request("it has no run.toml that can be read", "name the directory of a run"))?;
        let steps: Vec<StepMetrics> = lines(&dir.join("metrics.jsonl"))?;
        let mut seen: Vec<(f64, f64, f64)> =
            steps.iter().filter_map(|s| Some((s.tokens as f64, s.loss, s.noise_scale?))).collect();
        // The smoothed estimates forget their start in some hundred steps; of a short run, a tenth.
        let skipped = (seen.len() / 10).max(100.min(seen.len() / 2));
        seen.drain(..skipped);
        let pairs = |of: fn(&(f64, f64, f64)) -> f64| seen.iter().map(|s| (of(s), s.2)).collect::<Vec<_>>();
        let over_tokens = PowerLaw::fit(&pairs(|s| s.0)).ok_or_else(|| {
            request("it has no noise scale to fit", "train it with train.noise_scale = true, for some hundred steps")
        })?;
        let global_batch = config.batches().stages().first().map_or(config.train.global_batch, |s| s.sequences);
        let in_sequences = over_tokens;
        Ok(Self {
            global_batch,
            seq: config.train.seq,
            last: seen.last().map_or(0.0, |s| s.2),
            over_loss: PowerLaw::fit(&pairs(|s| s.1)),
            ramp: batch_ramp(&in_sequences, global_batch, tokens),
            over_tokens,
            tokens,
        })
    }

    fn key(&self) -> String {
        let step = |s: &RampStep| format!("{{ tokens = {}, global_batch = {} }}", s.tokens, s.sequences);
        format!("train.batch_ramp = [{}]", self.ramp.iter().map(step).collect::<Vec<_>>().join(", "))
    }

    fn as_json(&self) -> Value {
        json!({
            "noise_scale_sequences": self.last,
            "critical_batch_tokens": self.last * self.seq as f64,
            "over_tokens": self.over_tokens,
            "over_loss": self.over_loss,
            "global_batch": self.global_batch,
            "tokens": self.tokens,
            "batch_ramp": self.ramp,
        })
    }

    fn as_text(&self) -> String {
        let law = &self.over_tokens;
        let tokens = |sequences: f64| units::count((sequences * self.seq as f64).round() as u64);
        let mut lines = vec![
            format!(
                "noise scale at the end of the run: {:.1} sequences, a critical batch of {} tokens (its batch: {})",
                self.last,
                tokens(self.last),
                tokens(self.global_batch as f64)
            ),
            format!(
                "over tokens: {:.3e} sequences · tokens^{:.3} (R² {:.2}, {} steps); after {} tokens: {:.0} sequences, {} tokens",
                law.factor,
                law.exponent,
                law.r_squared,
                thousands(law.points as u64),
                units::count(self.tokens),
                law.at(self.tokens as f64),
                tokens(law.at(self.tokens as f64))
            ),
        ];
        if let Some(law) = &self.over_loss {
            lines.push(format!(
                "over loss: {:.3e} sequences · loss^{:.3} (R² {:.2})",
                law.factor, law.exponent, law.r_squared
            ));
        }
        lines.push(match self.ramp.is_empty() {
            true if law.exponent <= 0.0 => {
                "the noise scale does not grow over this run: no batch ramp follows from it".into()
            }
            true => "the noise scale stays below twice the batch: no batch ramp follows from it".into(),
            false => format!("twice the batch where the noise scale has come to it: {}", self.key()),
        });
        let body: String = lines.iter().map(|line| wrapped(&format!("  {line}"), "    ")).collect();
        format!("\nthe batch, by the gradient noise of a run\n{body}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_suffixes_or_exponents() {
        for (text, expected) in
            [("2M", Some(2e6)), ("1.5K", Some(1500.0)), ("1e24", Some(1e24)), ("12", Some(12.0)), ("many", None)]
        {
            assert_eq!(number_of(text), expected, "{text}");
        }
    }
}
