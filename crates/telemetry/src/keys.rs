//! What the keys of metrics mean.

/// The unit of a metric; empty for what has none or is not known.
pub fn unit(key: &str) -> &'static str {
    match key.split('/').next().unwrap_or(key) {
        "loss" | "mtp_loss" | "val_loss" | "loss_limit" | "shadow_loss_bf16" | "shadow_loss_fp8" => "nats per token",
        "step_s" | "rank_busy_s" => "s",
        "tokens" | "critical_batch_tokens" => "tokens",
        "tokens_per_s" => "tokens/s",
        "mfu" => "share of peak",
        "goodput" => "share of time",
        "shadow_difference" => "share of loss",
        "fp8_overflow" | "fp8_underflow" => "share of elements",
        "noise_scale" => "sequences",
        "expert_most" | "expert_least" => "× even",
        key if key.ends_with("_bytes") => "bytes",
        key if key.ends_with("_w") => "W",
        key if key.ends_with("_j") => "J",
        key if key.ends_with("_kwh") => "kWh",
        key if key.ends_with("_c") => "°C",
        key if key.ends_with("_mhz") => "MHz",
        key if key.ends_with("_percent") => "%",
        key if key.ends_with("_s") => "s",
        _ => "",
    }
}
