//! Numbers with units, as a person reads them.

/// Bytes with a binary unit: `1.50 GiB`, `12.0 KiB`, `17 B`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    scaled(n as f64, 1024.0, &UNITS, n < 1024)
}

/// Bytes in GiB, to be added up by eye: `48.13 GiB`.
pub fn gib(n: u64) -> String {
    format!("{:.2} GiB", n as f64 / (1u64 << 30) as f64)
}

/// A count with a decimal suffix: `1.24B`, `29.4M`, `512`.
pub fn count(n: u64) -> String {
    const UNITS: [&str; 6] = ["", "K", "M", "B", "T", "Q"];
    scaled(n as f64, 1000.0, &UNITS, n < 1000).replace(' ', "")
}

/// A number of things: `1 GPU`, `2 GPUs`, `1,024 GPUs`.
pub fn counted(n: usize, what: &str) -> String {
    format!("{} {what}{}", thousands(n as u64), if n == 1 { "" } else { "s" })
}

/// Floating-point operations with a decimal prefix: `3.20 TFLOP`.
pub fn flops(n: f64) -> String {
    const UNITS: [&str; 9] = ["FLOP", "KFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"];
    scaled(n, 1000.0, &UNITS, false)
}

/// Joules with a decimal prefix: `3.20 MJ`.
pub fn joules(j: f64) -> String {
    scaled(j, 1000.0, &["J", "kJ", "MJ", "GJ", "TJ"], false)
}

/// Kilowatt-hours: `850 kWh`, `12.3 MWh`.
pub fn kilowatt_hours(kwh: f64) -> String {
    scaled(kwh, 1000.0, &["kWh", "MWh", "GWh", "TWh"], false)
}

/// Seconds as `850 ms`, `12.3 s`, `4m 05s` or `2h 03m`.
pub fn seconds(s: f64) -> String {
    let whole = s.round() as u64;
    match s {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 60.0 => format!("{s:.1} s"),
        s if s < 3600.0 => format!("{}m {:02}s", whole / 60, whole % 60),
        _ => format!("{}h {:02}m", whole / 3600, whole % 3600 / 60),
    }
}

fn scaled(mut x: f64, base: f64, units: &[&str], whole: bool) -> String {
    let mut unit = 0;
    while x >= base && unit + 1 < units.len() {
        x /= base;
        unit += 1;
    }
    let digits = match x {
        _ if whole => 0,
        x if x < 10.0 => 2,
        x if x < 100.0 => 1,
        _ => 0,
    };
    format!("{x:.digits$} {}", units[unit]).trim_end().to_owned()
}

/// `1234567` as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(c);
    }
    text
}

/// `rank 3`, `ranks 1, 2 and 3`.
pub fn ranks(ranks: &[usize]) -> String {
    let text: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match &text[..] {
        [only] => format!("rank {only}"),
        [first @ .., last] => format!("ranks {} and {last}", first.join(", ")),
        [] => "no rank".to_owned(),
    }
}

/// Where an event of a Chrome trace starts, and how long it is, in microseconds: whole nanoseconds, so that it ends no later than the
/// next one starts. Viewers drop events that overlap.
pub fn trace_span(start_us: f64, end_us: f64) -> (f64, f64) {
    let [start, end] = [start_us, end_us].map(|us| (us * 1e3).round());
    (start / 1e3, (end - start) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!(bytes(17), "17 B");
        assert_eq!(bytes(1536), "1.50 KiB");
        assert_eq!(bytes(80 << 30), "80.0 GiB");
        assert_eq!(gib(569_000_000), "0.53 GiB");
        assert_eq!(count(8_030_261_248), "8.03B");
        assert_eq!(count(512), "512");
        assert_eq!(flops(3.2e12), "3.20 TFLOP");
        assert_eq!(seconds(0.0421), "42 ms");
        assert_eq!(seconds(125.0), "2m 05s");
        assert_eq!(thousands(1234567), "1,234,567");
        assert_eq!(thousands(12), "12");
    }
}
