//! fp8 with many units in a tensor: bytes and their transposes, and matmuls of them.

use super::launch::{Launches, launches};
use super::quantise::{counted, forward, grad_weight, looked_at};
use crate::CudaError;
use crate::call::{Call, suffix};
use crate::kernels::args;
use lockstep_ir::op::Fine;
use lockstep_ir::{DType, Workspace};

/// The launches of this family.
pub fn launches() -> Launches {
    launches! { call:
        QuantiseFine { by, weight, to } => quantise(call, (by, weight), to),
        FineLinear { .. } => forward(call),
        FineGradWeight { .. } => grad_weight(call),
    }
}

/// Rows and columns of a tile, as in `fp8.cuh`.
const TILE: usize = 128;

/// Scratch of units of rows: the largest magnitudes of all rows and columns.
pub fn scratch(dims: [&'static str; 2]) -> Workspace {
    Workspace { fixed: 0, terms: dims.map(|of| (4, of)).into() }
}

/// Bytes and their transpose with their units.
unsafe fn quantise(call: Call, (by, weight): (Fine, bool), to: DType) -> Result<(), CudaError> {
    let columns: usize = call.bound.columns.iter().sum();
    let rows = call.bound.inputs[0].elements / columns.max(1);
    let multiple = if by == Fine::Blocks { TILE } else { 16 };
    if !(rows.is_multiple_of(multiple) && columns.is_multiple_of(multiple)) {
        return Err(CudaError::Internal(format!("{rows} × {columns} elements are no multiples of {multiple}")));
    }
    let grid = [rows.div_ceil(TILE), columns.div_ceil(TILE), 1];
    let outputs = [0, 1, 2, 3].map(|o| call.output(o));
    let largest = if by == Fine::Rows { Some(call.scratch()?) } else { None };
    let of_columns = largest.map(|largest| largest + 4 * rows as u64);
    let [q, units, transposed, units_transposed] = outputs;
    let seen = counted(call, 4)?;
    let args = args![call.input(0), largest, of_columns, q, units, transposed, units_transposed, rows, columns];
    let (kernel, format) = match (by, weight) {
        (Fine::Rows, _) => ("rows", suffix(to)),
        (Fine::Blocks, false) => ("blocks", suffix(to)),
        (Fine::Blocks, true) => ("blocks_of_weight", suffix(to)),
    };
    // SAFETY: the operands have these sizes, and the scratch a number of every row and column; an output that nobody asks for is not written.
    unsafe {
        if let Some(largest) = largest {
            call.stream.fill(largest, 0, 4 * (rows + columns))?;
            call.typed(("fine", "measure"), grid, 256, args)?;
        }
        call.plain(("fine", &format!("{kernel}_{}_{format}", call.suffix())), grid, 256, args)?;
        match seen {
            Some(seen) => {
                let units =
                    units.ok_or_else(|| CudaError::Internal("what is lost is asked for without units".into()))?;
                let width = if by == Fine::Rows { columns } else { TILE };
                let args = args![call.input(0), units, width, seen, rows, columns];
                let kernel = format!("lost_{}_{format}", call.suffix());
                call.plain(("fine", &kernel), [looked_at(rows, columns), 1, 1], 256, args)
            }
            None => Ok(()),
        }
    }
}
