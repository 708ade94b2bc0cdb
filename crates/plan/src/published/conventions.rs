//! Step times from FLOP rates: how each source counts the FLOPs of a token.

use super::peer::Peer;
use super::row::{FlopRate, Measured, Row};
use lockstep_sim::GpuSpec;

/// Which FLOPs a source counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Convention {
    /// 6 per parameter of a matmul, the output head among them, and attention over all positions.
    Full,
    /// The same with what the mask leaves of attention.
    Causal,
    /// 6 per parameter, tables of embeddings among them, and attention over all positions.
    Parameters,
    /// 72 · layers · hidden² per token and what attention and the logits add, of an MLP of four times the width.
    Gpt,
    /// The same with the recomputed forward pass: 96 instead of 72.
    GptRecomputed,
}

impl Convention {
    /// How a framework's tables count.
    fn of(peer: Peer, row: &Row) -> Self {
        let (source, recompute) = (row.source.to_lowercase(), row.recompute.to_lowercase());
        match peer {
            Peer::LlmFoundry | Peer::Nanotron => Convention::Parameters,
            Peer::Torchtitan | Peer::TorchtitanEager => Convention::Full,
            Peer::Megatron2021 if recompute.starts_with("full") => Convention::GptRecomputed,
            Peer::Megatron2021 => Convention::Gpt,
            Peer::Megatron if source.contains("bridge") => Convention::Causal,
            Peer::Megatron | Peer::HaiLlm => Convention::Full,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Convention::Full => "6 × matmul parameters + full attention",
            Convention::Causal => "6 × matmul parameters + causal attention",
            Convention::Parameters => "6 × parameters + full attention",
            Convention::Gpt => "72 × layers × hidden² of GPT",
            Convention::GptRecomputed => "96 × layers × hidden² of GPT, recompute among them",
        }
    }

    /// FLOPs of a token; the size that is missing where one is.
    fn per_token(self, row: &Row) -> Result<f64, &'static str> {
        let shape = &row.shape;
        let (layers, hidden, seq) = (shape.layers as f64, shape.hidden as f64, shape.seq as f64);
        let vocab = shape.vocab.ok_or("vocab")? as f64;
        if matches!(self, Convention::Gpt | Convention::GptRecomputed) {
            let factor = if self == Convention::Gpt { 72.0 } else { 96.0 };
            let more = 1.0 + seq / (6.0 * hidden) + vocab / (16.0 * layers * hidden);
            return Ok(factor * layers * hidden * hidden * more);
        }
        let known = row.known.as_ref();
        let experts = known.and_then(|k| Some((k.active_experts? * k.expert_ffn?) as f64));
        let gated = !row.is_gpt();
        let ffn = match experts {
            Some(ffn) => ffn,
            None => shape.ffn.map(|ffn| ffn as f64).or((!gated).then_some(4.0 * hidden)).ok_or("ffn")?,
        };
        let queries = shape.kv_heads.map_or(1.0, |kv| kv as f64 / shape.heads as f64);
        let layer = hidden * (hidden * (2.0 + 2.0 * queries) + if gated { 3.0 } else { 2.0 } * ffn);
        let tables = match self {
            // GPT's tables are one.
            Convention::Parameters if gated => 2.0,
            _ => 1.0,
        };
        let attention = if self == Convention::Causal { 6.0 } else { 12.0 };
        Ok(6.0 * (layers * layer + tables * vocab * hidden) + attention * layers * hidden * seq)
    }
}

/// Gives a row that has only a FLOP rate the step time that it means, by how its framework's tables count. A row of which that is not known
/// keeps none.
pub(super) fn give_time(row: &mut Row, framework: Option<Peer>, gpu: &GpuSpec) -> Result<(), String> {
    let (Some(rate), Some(peer)) = (row.rate, framework.or_else(|| Peer::of(row))) else { return Ok(()) };
    let column = rate.column();
    let convention = Convention::of(peer, row);
    let per_token = convention.per_token(row);
    let per_token = per_token.map_err(|size| format!("{column} counts FLOPs by {size}, which is not given"))?;
    let fp8 = gpu.fp8_flops_per_s.filter(|_| row.is_fp8());
    let of = if fp8.is_some() { "fp8" } else { "16-bit" };
    let (flops_per_s, peak) = match rate {
        FlopRate::PerGpu(flops) => (flops, String::new()),
        FlopRate::OfPeak(share) => {
            let peak = fp8.unwrap_or(gpu.peak_flops_per_s);
            (share * peak, format!(" of the {of} peak, {:.0} TFLOP/s", peak / 1e12))
        }
    };
    let tokens = (row.split.global_batch * row.shape.seq) as f64 / row.gpus as f64;
    let seconds = per_token * tokens / flops_per_s;
    row.measured = Some(Measured { step_s: Some(seconds), ..row.measured.unwrap_or_default() });
    row.assumed.push(format!("step time by {column}{peak}, FLOPs as {}", convention.name()));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::read;
    use lockstep_sim::Catalogue;

    /// The step time that a row of a FLOP rate means, and what that assumes.
    fn time(source: &str, row: &str) -> (f64, String) {
        let header = "source,model,layers,hidden,heads,kv_heads,ffn,vocab,seq,gpus,gpu,tp,pp,dp,microbatch,global_batch,precision,\
                      tflops_per_gpu,mfu,recompute\n";
        let (mut rows, refused) = read(&format!("{header}{source},{row}\n"));
        assert!(refused.is_empty(), "{refused:?}");
        let gpu = Catalogue::builtin().gpu("h100").unwrap().clone();
        give_time(&mut rows[0], None, &gpu).unwrap();
        (rows[0].measured.unwrap().step_s.unwrap(), rows[0].assumed.join("; "))
    }

    #[test]
    fn a_flop_rate_is_the_step_time_that_its_table_prints_beside_it() {
        // (source, row, the step time of the same table)
        let rows = [
            ("NVIDIA dgxc-benchmarking", "llama-3.1-8b,,,,,,,8192,8,H100,1,1,n/a,1,128,BF16,,62.47,", 12.27),
            ("NVIDIA dgxc-benchmarking", "llama-3.1-8b,,,,,,,8192,8,H100,1,1,8,1,128,FP8,n/a,0.4107,", 9.33),
            ("Megatron-Bridge", "LLAMA3_8B,,,,,,,8192,8,DGX-H100,1,1,8,1,128,FP8-CS,744,NA,", 9.07),
            ("Narayanan SC21", "GPT-1.7B,24,2304,24,,9216,51200,2048,32,H100,1,1,32,16,512,fp16,137,,full", 3.53),
        ];
        for (source, row, seconds) in rows {
            let (found, assumed) = time(source, row);
            assert!((found / seconds - 1.0).abs() < 0.006, "{row}: {found} s");
            assert!(assumed.contains("step time by ") && assumed.contains("FLOPs as "), "{assumed}");
        }
    }
}
