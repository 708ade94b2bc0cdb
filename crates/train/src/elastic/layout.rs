//! The layout of a world of this many ranks.

use lockstep_config::{Config, legal};
use lockstep_ir::{Layout, MeshAxis};

/// The config with a layout for at most this many ranks, and how many it uses; none where no layout fits.
///
/// Data parallelism changes first: that changes no bit of a reproducible run. Only where not one copy of the model fits, the other axes
/// shrink too: positions, then experts, heads, layers.
pub(crate) fn fitting(config: &Config, ranks: usize) -> Option<(Config, usize)> {
    let mut layout = config.layout();
    loop {
        if let Some(found) = with_data_parallel(config, &layout, ranks) {
            return Some(found);
        }
        layout.mesh = smaller(&layout)?;
        if layout.mesh.size(MeshAxis::Cp) == 1 && layout.mesh.size(MeshAxis::Tp) == 1 {
            layout.sequence_parallel = false;
        }
        if layout.mesh.size(MeshAxis::Pp) == 1 {
            (layout.schedule, layout.chunks) = (Default::default(), 1);
        }
    }
}

/// With as many ranks along the data-parallel axes as fit.
fn with_data_parallel(config: &Config, layout: &Layout, ranks: usize) -> Option<(Config, usize)> {
    let (replicas, shards) = (layout.mesh.size(MeshAxis::DpReplicate), layout.mesh.size(MeshAxis::DpShard));
    let of_one = layout.mesh.ranks() / (replicas * shards);
    let most = (ranks / of_one).min(legal_batch(config));
    (1..=most).rev().find_map(|copies| {
        // Replicas stay where they divide what is there.
        let replicas = if copies % replicas == 0 { replicas } else { 1 };
        let mesh = layout.mesh.with(MeshAxis::DpReplicate, replicas).with(MeshAxis::DpShard, copies / replicas);
        let at = with_layout(config, &Layout { mesh, ..*layout })?;
        Some((at, copies * of_one))
    })
}

/// No more copies of a model than sequences of a batch.
fn legal_batch(config: &Config) -> usize {
    config.train.global_batch.max(1)
}

/// The config with a layout, if it is legal.
fn with_layout(config: &Config, layout: &Layout) -> Option<Config> {
    let at = config.at(layout);
    // What shards state over ranks has nothing to shard over one.
    let mut layout = at.layout();
    if layout.mesh.size(MeshAxis::DpShard) * layout.mesh.size(MeshAxis::Cp) == 1 {
        layout.zero = 0;
    }
    let legal = |layout: &Layout| legal::check(layout, &config.at(layout).extents()).is_empty();
    let zeros = [at.layout(), layout];
    zeros.iter().find(|layout| legal(layout)).map(|layout| config.at(layout))
}

/// One axis less wide than before: the first of those that may shrink.
fn smaller(layout: &Layout) -> Option<lockstep_ir::Mesh> {
    let axes = [MeshAxis::Cp, MeshAxis::Ep, MeshAxis::Tp, MeshAxis::Pp];
    let axis = axes.into_iter().find(|axis| layout.mesh.size(*axis) > 1)?;
    let size = layout.mesh.size(axis);
    let divisor = (2..=size).find(|divisor| size.is_multiple_of(*divisor))?;
    Some(layout.mesh.with(axis, size / divisor))
}

/// Whether a run has other bits with this layout than with its own: more than the data-parallel axes differ, or sums of gradients are not exact.
pub(crate) fn changes_bits(config: &Config, at: &Config) -> bool {
    let (before, now) = (config.layout().mesh, at.layout().mesh);
    let axes = [MeshAxis::Cp, MeshAxis::Ep, MeshAxis::Tp];
    let other = axes.into_iter().any(|axis| before.size(axis) != now.size(axis));
    other || (!config.train.reproducible && before != now)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_parallelism_shrinks_first_and_other_axes_where_no_copy_of_the_model_fits() {
        let fits = |keys: &str, ranks: usize| {
            let text = format!(
                "[model]\narchitecture = \"llama\"\nvocab_size = 61\nlayers = 2\ndim = 16\nheads = 4\nffn = 32\n\
                 [train]\nseq = 8\nglobal_batch = 12\nmicro_batch = 1\nreproducible = true\n[parallel]\n{keys}\n"
            );
            let config = Config::parse(&text, "run.toml", &[]).unwrap();
            let (at, used) = fitting(&config, ranks).unwrap();
            assert_eq!(at.layout().mesh.ranks(), used, "{keys}");
            (at.layout().to_string(), used, changes_bits(&config, &at))
        };
        assert_eq!(fits("dp = 4\nzero = 1", 3), ("dp=3 zero=1".into(), 3, false));
        // Five do not divide the batch: one waits.
        assert_eq!(fits("dp = 6\nzero = 3", 5), ("dp=4 zero=3".into(), 4, false));
        assert_eq!(fits("dp = 2\npp = 2", 3), ("pp=2 1f1b".into(), 2, false));
        assert_eq!(fits("dp = 2\npp = 2", 1).1, 1);
        assert_eq!(fits("dp = 2\ntp = 2", 3), ("tp=2".into(), 2, false));
        assert_eq!(fits("dp = 2\ntp = 2", 1), ("one rank".into(), 1, true));
        let (_, used, changes) = fits("dp = 2\ncp = 2\ntp = 2", 3);
        assert_eq!((used, changes), (2, true));
    }
}
