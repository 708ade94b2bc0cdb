//! Tensors as the files of a checkpoint make them up.

use std::collections::BTreeMap;
use std::ops::Range;

use lockstep_ir::DType;

use crate::slice::{Misfit, Slice, check_cover};
use crate::tensor_file::TensorPlace;

/// A tensor, and where its elements are.
#[derive(Debug)]
pub(crate) struct Stored {
    pub(crate) dtype: DType,
    pub(crate) shape: Vec<usize>,
    /// By ascending file.
    pub(crate) pieces: Vec<Piece>,
}

/// Some elements of a tensor.
#[derive(Debug)]
pub(crate) struct Piece {
    /// Which of the files has them.
    pub(crate) file: usize,
    /// Where, in bytes from the start of the file.
    pub(crate) range: Range<usize>,
    /// Which they are, in order.
    pub(crate) slices: Vec<Slice>,
}

/// The tensors of every group, from the group and contents of each file; or the index of a file that is wrong, and why.
///
/// Every element of every tensor is in one place: nothing else passes.
pub(crate) fn join(
    files: Vec<(&str, BTreeMap<String, TensorPlace>)>,
) -> Result<BTreeMap<String, BTreeMap<String, Stored>>, (usize, String)> {
    let mut groups: BTreeMap<String, BTreeMap<String, Stored>> = BTreeMap::new();
    for (file, (group, places)) in files.into_iter().enumerate() {
        let tensors = groups.entry(group.to_owned()).or_default();
        for (name, TensorPlace { dtype, shape, slices, range }) in places {
            let piece = Piece { file, range, slices };
            match tensors.get_mut(&name) {
                None => {
                    tensors.insert(name, Stored { dtype, shape, pieces: vec![piece] });
                }
                Some(known) if known.dtype == dtype && known.shape == shape => known.pieces.push(piece),
                Some(known) => {
                    let (this, other) = (format!("{dtype} {shape:?}"), format!("{} {:?}", known.dtype, known.shape));
                    return Err((file, format!("tensor `{name}` is {this} here and {other} in another file")));
                }
            }
        }
    }
    for (name, tensor) in groups.values().flatten() {
        check(tensor).map_err(|(file, cause)| (file, format!("tensor `{name}`: {cause}")))?;
    }
    Ok(groups)
}

/// Checks that the pieces make up the tensor.
fn check(tensor: &Stored) -> Result<(), (usize, String)> {
    let file = |piece: usize| tensor.pieces.get(piece).map_or(0, |piece| piece.file);
    // `read_header` lets no larger shape pass.
    let elements = tensor.shape.iter().product();
    let parts: Vec<&[Slice]> = tensor.pieces.iter().map(|piece| piece.slices.as_slice()).collect();
    check_cover(&parts, elements).map_err(|misfit| match misfit {
        Misfit::Missing { held } => (file(0), format!("its files have {held} of {elements} elements")),
        Misfit::Twice { part, element } => (file(part), format!("element {element} is there a second time")),
    })
}
