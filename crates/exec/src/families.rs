//! Readers of the op table: what each makes of an op stands in the file of the op's family, in a table by kind.

/// The table of a family: `Kind { attribute } => expression,` for each of its ops, as pairs of a kind and a function of a call, whose `op()`
/// is the op.
#[macro_export]
macro_rules! by_kind {
    ($call:ident: $of:ty => $to:ty; $($kind:ident $({ $($attribute:tt)* })? => $run:expr,)*) => {
        vec![$((lockstep_ir::OpKind::$kind, (|$call: $of| {
            let lockstep_ir::Op::$kind $({ $($attribute)* })? = $call.op() else {
                unreachable!("{} in the entry of another op", $call.op().name())
            };
            $run
        }) as $to),)*]
    };
}
