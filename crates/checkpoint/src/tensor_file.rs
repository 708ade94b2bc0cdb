//! A file of tensors, in the standard safetensors format.
//!
//! Eight bytes of header length, little endian; a JSON header, padded with spaces to a multiple of eight; the tensors'
//! bytes, without gaps. Here tensors stand in name order, so wide elements may lie at odd addresses: readers copy bytes.
//!
//! Where a file has only some elements of a tensor, they stand there as a list, and the header's metadata say which they
//! are: under the key `lockstep.parts`, as JSON, `{"<tensor>": {"shape": [<of the whole>], "slices": [[start, len, stride,
//! count], …]}, …}`. A tensor that is not named there is whole.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::{self, Write};
use std::ops::Range;

use lockstep_ir::DType;
use lockstep_ir::dynamic8::BLOCK_BYTES;
use safetensors::Dtype as FileDType;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::bytes::TensorBytes;
use crate::manifest::checksum;
use crate::slice::{self, Slice};

pub(crate) const EXTENSION: &str = ".safetensors";
pub(crate) const LENGTH_BYTES: usize = 8;
/// The largest header that readers of the format accept.
const MAX_HEADER_BYTES: usize = 100_000_000;
/// The most that is written and hashed at a time.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// The key of the metadata under which parts are described.
const PARTS: &str = "lockstep.parts";

/// The file name of a group, where the group's name is fit for one: letters, digits, `-` and `_`.
pub(crate) fn file_name(group: &str) -> Option<String> {
    let fit = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    (!group.is_empty() && group.len() <= 200 && group.chars().all(fit)).then(|| format!("{group}{EXTENSION}"))
}

/// The group of a name that [`file_name`] could have made.
pub(crate) fn group_of(file: &str) -> Option<&str> {
    file.strip_suffix(EXTENSION).filter(|group| file_name(group).is_some())
}

/// The name of the file with what one rank has of a group.
pub(crate) fn rank_file_name(group: &str, rank: usize) -> Option<String> {
    file_name(group)?;
    file_name(&format!("{group}-{rank:05}"))
}

/// The group of a name that [`rank_file_name`] could have made.
pub(crate) fn group_of_rank_file(file: &str) -> Option<&str> {
    let (group, rank) = group_of(file)?.rsplit_once('-')?;
    let rank = rank.parse().ok()?;
    rank_file_name(group, rank).filter(|name| name == file).map(|_| group)
}

/// A tensor, or some of its elements, on the way into a file.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    pub(crate) name: &'a str,
    pub(crate) dtype: DType,
    /// Of the whole tensor.
    pub(crate) shape: &'a [usize],
    /// Which elements these are.
    pub(crate) slices: Vec<Slice>,
    /// Their bytes, in the order of the slices, in as many pieces as they lie in.
    pub(crate) data: Vec<&'a TensorBytes<'a>>,
}

impl Item<'_> {
    fn bytes(&self) -> usize {
        self.data.iter().map(|piece| piece.count()).sum()
    }
}

/// How the metadata describe a part of a tensor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PartOf {
    shape: Vec<usize>,
    slices: Vec<Slice>,
}

/// A file that is laid out and not yet written.
#[derive(Debug)]
pub(crate) struct TensorFile<'a> {
    /// Length and header.
    front: Vec<u8>,
    /// By ascending name.
    tensors: Vec<Item<'a>>,
}

impl<'a> TensorFile<'a> {
    /// Orders the tensors and builds the header, or says which tensor is at fault.
    pub(crate) fn new(mut tensors: Vec<Item<'a>>) -> Result<TensorFile<'a>, String> {
        tensors.sort_by(|a, b| a.name.cmp(b.name));
        if let Some(pair) = tensors.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(format!("tensor `{}` is given twice", pair[0].name));
        }
        let mut end = 0usize;
        let mut infos = Vec::with_capacity(tensors.len());
        let mut parts = BTreeMap::new();
        for tensor in &tensors {
            let held = check_item(tensor)?;
            let start = end;
            end = start.checked_add(tensor.bytes()).ok_or("the tensors are too large together")?;
            let (dtype, width) = file_dtype(tensor.dtype);
            let mut shape = tensor.shape.to_vec();
            if tensor.slices != Slice::whole(shape.iter().product()) {
                let whole = std::mem::replace(&mut shape, vec![held]);
                parts.insert(tensor.name, PartOf { shape: whole, slices: tensor.slices.clone() });
            }
            // The bytes of a block follow each other in the last dimension.
            if let Some(last) = shape.last_mut() {
                *last *= width;
            }
            infos.push((tensor.name.to_owned(), TensorInfo { dtype, shape, data_offsets: (start, end) }));
        }
        // One key only: the map has no order.
        let described = match parts.is_empty() {
            true => None,
            false => {
                let text = serde_json::to_string(&parts).map_err(|error| error.to_string())?;
                Some(HashMap::from([(PARTS.to_owned(), text)]))
            }
        };
        Ok(TensorFile { front: front(described, infos)?, tensors })
    }

    /// The bytes before the first tensor's.
    pub(crate) fn header_bytes(&self) -> u64 {
        self.front.len() as u64
    }

    /// The length of the whole file.
    pub(crate) fn bytes(&self) -> u64 {
        self.tensors.iter().fold(self.front.len() as u64, |sum, tensor| sum + tensor.bytes() as u64)
    }

    /// Streams the file out, tells `wrote` the length of every chunk, and returns the checksum.
    pub(crate) fn write(&self, to: &mut dyn Write, wrote: &mut dyn FnMut(u64)) -> io::Result<String> {
        let mut hasher = Xxh3::new();
        let mut put = |chunk: &[u8]| {
            to.write_all(chunk)?;
            hasher.update(chunk);
            wrote(chunk.len() as u64);
            Ok(())
        };
        self.front.chunks(CHUNK_BYTES).try_for_each(&mut put)?;
        for piece in self.tensors.iter().flat_map(|tensor| &tensor.data) {
            piece.chunks(CHUNK_BYTES, &mut put)?;
        }
        Ok(checksum(hasher.digest128()))
    }
}

/// Length and header of a file with these tensors, which lie without gaps.
pub(crate) fn front(
    metadata: Option<HashMap<String, String>>,
    tensors: Vec<(String, TensorInfo)>,
) -> Result<Vec<u8>, String> {
    let metadata = Metadata::new(metadata, tensors).map_err(|error| error.to_string())?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    header.resize(header.len().next_multiple_of(LENGTH_BYTES), b' ');
    if header.len() > MAX_HEADER_BYTES {
        return Err(format!("the names and shapes take {} bytes, more than {MAX_HEADER_BYTES}", header.len()));
    }
    Ok([(header.len() as u64).to_le_bytes().as_slice(), &header].concat())
}

/// Where a tensor, or some of its elements, lies in a file.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TensorPlace {
    pub(crate) dtype: DType,
    /// Of the whole tensor.
    pub(crate) shape: Vec<usize>,
    /// Which elements are there: inside the tensor, as many as the range has.
    pub(crate) slices: Vec<Slice>,
    /// In bytes from the start of the file, inside the file.
    pub(crate) range: Range<usize>,
}

/// Reads the header of a whole file of any origin. Every place it returns lies inside `file`.
pub(crate) fn read_header(file: &[u8]) -> Result<BTreeMap<String, TensorPlace>, String> {
    read_header_of(file, file.len())
}

/// The header of a file, with its length before it; what comes after it is not read.
pub(crate) fn header_of(file: &[u8]) -> Result<&[u8], String> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or("too short for a header")?;
    Ok(&file[..LENGTH_BYTES + header_length(*length, rest.len() as u64)?])
}

/// As [`read_header`], of a file of `bytes` bytes that begins so, with the whole header.
pub(crate) fn read_header_of(file: &[u8], bytes: usize) -> Result<BTreeMap<String, TensorPlace>, String> {
    let (length, rest) = file.split_first_chunk::<LENGTH_BYTES>().ok_or("too short for a header")?;
    let header = rest.get(..header_length(*length, rest.len() as u64)?).unwrap_or_default();
    let base = LENGTH_BYTES + header.len();
    let payload = bytes.checked_sub(base).ok_or("too short for its header")?;
    let metadata = read_metadata(header, payload as u64)?;
    let described = metadata.metadata().as_ref().and_then(|map| map.get(PARTS)).map_or("{}", String::as_str);
    let mut parts: BTreeMap<String, PartOf> =
        serde_json::from_str(described).map_err(|error| format!("wrong `{PARTS}`: {error}"))?;
    let mut places = BTreeMap::new();
    for (name, info) in metadata.tensors() {
        let (dtype, width) = known_dtype(info)
            .ok_or_else(|| format!("tensor `{name}` has elements of type {}, which are not supported", info.dtype))?;
        let (start, end) = info.data_offsets;
        let mut shape = info.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last /= width;
        }
        // `Metadata` has checked that the shape is of as many elements.
        let here = (end - start) / dtype.bytes();
        let (shape, slices) = match parts.remove(&name) {
            None => (shape, Slice::whole(here)),
            Some(PartOf { shape, slices }) => {
                let held = held(&shape, dtype, &slices).map_err(|cause| format!("tensor `{name}`: {cause}"))?;
                if held != here {
                    return Err(format!("tensor `{name}`: its slices are of {held} elements, {here} are there"));
                }
                (shape, slices)
            }
        };
        places.insert(name, TensorPlace { dtype, shape, slices, range: base + start..base + end });
    }
    match parts.keys().next() {
        Some(name) => Err(format!("tensor `{name}` is described and not there")),
        None => Ok(places),
    }
}

/// The header's length, from the first bytes of a file with `rest` bytes after them.
pub(crate) fn header_length(first: [u8; LENGTH_BYTES], rest: u64) -> Result<usize, String> {
    let length = u64::from_le_bytes(first);
    let fits = length <= rest && length <= MAX_HEADER_BYTES as u64;
    usize::try_from(length).ok().filter(|_| fits).ok_or_else(|| "the header's length is out of range".to_owned())
}

/// Reads a header of any origin that `payload` bytes follow. The tensors it describes lie in them, without gaps.
pub(crate) fn read_metadata(header: &[u8], payload: u64) -> Result<Metadata, String> {
    if !header.starts_with(b"{") {
        return Err("the header is not JSON".to_owned());
    }
    let wrong = |error: serde_json::Error| format!("wrong header: {error}");
    let _: DistinctKeys = serde_json::from_slice(header).map_err(wrong)?;
    // `Metadata` refuses gaps, overlaps and shapes that disagree with their bytes. What it leaves to its reader is that
    // the tensors end where the file does; `SafeTensors::read_metadata` checks that by a sum that can overflow.
    let metadata: Metadata = serde_json::from_slice(header).map_err(wrong)?;
    match metadata.data_len() as u64 == payload {
        true => Ok(metadata),
        false => Err(format!("the header describes {} bytes, {payload} follow", metadata.data_len())),
    }
}

/// A JSON object of any content that names nothing twice: of two tensors of a name, `Metadata` would take the last.
struct DistinctKeys;

impl<'de> Deserialize<'de> for DistinctKeys {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Keys;
        impl<'de> Visitor<'de> for Keys {
            type Value = DistinctKeys;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<DistinctKeys, A::Error> {
                let mut seen = HashSet::new();
                while let Some((key, IgnoredAny)) = map.next_entry::<String, IgnoredAny>()? {
                    if let Some(key) = seen.replace(key) {
                        return Err(A::Error::custom(format!("`{key}` is there twice")));
                    }
                }
                Ok(DistinctKeys)
            }
        }
        deserializer.deserialize_map(Keys)
    }
}

/// How many elements of a tensor of this shape and type the slices hold.
fn held(shape: &[usize], dtype: DType, slices: &[Slice]) -> Result<usize, String> {
    let bytes = shape.iter().try_fold(dtype.bytes(), |product, &dim| product.checked_mul(dim));
    let bytes = bytes.ok_or_else(|| format!("{dtype} {shape:?} is too large"))?;
    slice::held(slices, bytes / dtype.bytes())
}

/// The number of elements of an item that can be written.
fn check_item(item: &Item<'_>) -> Result<usize, String> {
    let Item { name, dtype, shape, slices, .. } = item;
    if *name == "__metadata__" {
        return Err(format!("`{name}` is reserved by the format and cannot name a tensor"));
    }
    let held = held(shape, *dtype, slices).map_err(|cause| format!("tensor `{name}`: {cause}"))?;
    match held * dtype.bytes() == item.bytes() {
        true => Ok(held),
        false => Err(format!("tensor `{name}` has {} bytes, which is not {dtype} {shape:?}", item.bytes())),
    }
}

/// The type that files call it, and how many of those an element is: a block is as many as it has bytes.
pub(crate) fn file_dtype(dtype: DType) -> (FileDType, usize) {
    match dtype {
        DType::F32 => (FileDType::F32, 1),
        DType::BF16 => (FileDType::BF16, 1),
        DType::F16 => (FileDType::F16, 1),
        DType::E4M3 => (FileDType::F8_E4M3, 1),
        DType::E5M2 => (FileDType::F8_E5M2, 1),
        DType::Int8 => (FileDType::I8, 1),
        DType::Signed8 => (FileDType::I8, BLOCK_BYTES),
        DType::Unsigned8 => (FileDType::U8, BLOCK_BYTES),
        DType::F64 => (FileDType::F64, 1),
        DType::U32 => (FileDType::U32, 1),
        DType::Fixed64 => (FileDType::I64, 1),
    }
}

/// The type of a tensor in a file, and how many of the file's elements one of it is.
fn known_dtype(info: &TensorInfo) -> Option<(DType, usize)> {
    let fits = |width: usize| info.shape.last().copied().unwrap_or(1).is_multiple_of(width);
    let of = |known: DType| match file_dtype(known) {
        (dtype, width) if dtype == info.dtype && fits(width) => Some((known, width)),
        _ => None,
    };
    DType::ALL.into_iter().find_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(length: u64, header: &str, payload: usize) -> Vec<u8> {
        [length.to_le_bytes().as_slice(), header.as_bytes(), &vec![0; payload]].concat()
    }

    /// Refusing `header`, followed by `payload` bytes, must name the cause.
    fn check_refused(header: &str, payload: usize, expected: &str) {
        let refusal = read_header(&file(header.len() as u64, header, payload)).expect_err(header);
        assert!(refusal.contains(expected), "{refusal}");
    }

    fn entry(dtype: &str, shape: &str, offsets: &str) -> String {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    }

    #[test]
    fn a_sound_header_gives_places_in_the_file() {
        let header = format!(r#"{{"w":{}}}"#, entry("F32", "[2,1]", "[0,8]"));
        let places = read_header(&file(header.len() as u64, &header, 8)).unwrap();
        let base = 8 + header.len();
        let (shape, slices) = (vec![2, 1], Slice::whole(2));
        assert_eq!(places["w"], TensorPlace { dtype: DType::F32, shape, slices, range: base..base + 8 });
    }

    #[test]
    fn hostile_header_lengths_are_refused() {
        for length in [3, 1 << 20, 1 << 40, i64::MAX as u64, u64::MAX - 7, u64::MAX] {
            assert_eq!(read_header(&file(length, "{}", 0)), Err("the header's length is out of range".to_owned()));
        }
        for short in 0..8 {
            assert_eq!(read_header(&vec![0; short]), Err("too short for a header".to_owned()));
        }
        check_refused("", 0, "not JSON");
    }

    #[test]
    fn wrong_offsets_are_refused() {
        let two = |a: &str, b: &str| format!(r#"{{"a":{},"b":{}}}"#, entry("F32", "[2]", a), entry("F32", "[2]", b));
        check_refused(&two("[0,8]", "[4,12]"), 12, "invalid offset");
        check_refused(&two("[0,8]", "[0,8]"), 8, "invalid offset");
        check_refused(&two("[0,8]", "[12,20]"), 20, "invalid offset");
        check_refused(&two("[0,8]", "[8,0]"), 8, "invalid offset");
        check_refused(&two("[0,8]", "[8,16]"), 15, "describes 16 bytes, 15 follow");
        check_refused(&two("[0,8]", "[8,16]"), 17, "describes 16 bytes, 17 follow");
        check_refused(&two("[-8,0]", "[0,8]"), 8, "wrong header");
        let twice = format!(r#"{{"a":{0},"a":{0}}}"#, entry("F32", "[2]", "[0,8]"));
        check_refused(&twice, 8, "wrong header: `a` is there twice");
    }

    #[test]
    fn absurd_shapes_are_refused() {
        let one = |shape: &str, end: &str| format!(r#"{{"a":{}}}"#, entry("F64", shape, &format!("[0,{end}]")));
        check_refused(&one("[4294967296,4294967296]", "0"), 0, "overflow");
        check_refused(&one("[18446744073709551615]", "8"), 8, "overflow");
        check_refused(&one("[99999999999999999999999]", "8"), 8, "wrong header");
        check_refused(&one("[2]", "8"), 8, "invalid shape");
        check_refused(&one("[1000000000000]", "8000000000000"), 8, "describes 8000000000000 bytes, 8 follow");
    }

    /// Eight tensors that end just below 2⁶⁴: adding the header's length to that sum would overflow.
    #[test]
    fn offsets_near_the_largest_number_are_refused() {
        let size = (1u64 << 61) - 1;
        let tensor = |i: u64| {
            let offsets = format!("[{},{}]", i * size, (i + 1) * size);
            format!(r#""t{i}":{}"#, entry("U8", &format!("[{size}]"), &offsets))
        };
        let entries: Vec<_> = (0..8).map(tensor).collect();
        check_refused(&format!("{{{}}}", entries.join(",")), 0, "describes 18446744073709551608 bytes, 0 follow");
    }

    #[test]
    fn elements_we_cannot_hold_are_refused() {
        check_refused(&format!(r#"{{"a":{}}}"#, entry("I16", "[2]", "[0,4]")), 4, "I16");
        check_refused(&format!(r#"{{"a":{}}}"#, entry("Q99", "[2]", "[0,4]")), 4, "wrong header");
    }

    #[test]
    fn hostile_parts_are_refused() {
        let refused = |parts: &str, expected: &str| {
            let metadata = serde_json::json!({ PARTS: parts }).to_string();
            let header = format!(r#"{{"__metadata__":{metadata},"a":{}}}"#, entry("F32", "[4]", "[0,16]"));
            check_refused(&header, 16, expected);
        };
        refused("[]", "wrong `lockstep.parts`");
        refused(r#"{"a":{"shape":[8]}}"#, "missing field `slices`");
        refused(r#"{"a":{"shape":[8],"slices":[[0,4,4]]}}"#, "wrong `lockstep.parts`");
        refused(r#"{"a":{"shape":[8],"slices":[[0,-4,4,1]]}}"#, "wrong `lockstep.parts`");
        refused(r#"{"a":{"shape":[8],"slices":[[0,4e9,4,1]]}}"#, "wrong `lockstep.parts`");
        refused(r#"{"b":{"shape":[8],"slices":[[0,4,4,1]]}}"#, "tensor `b` is described and not there");
        refused(r#"{"a":{"shape":[8],"slices":[[5,4,4,1]]}}"#, "`a`: [5, 4, 4, 1] is no slice of 8 elements");
        refused(r#"{"a":{"shape":[8],"slices":[[0,2,1,2]]}}"#, "is no slice of 8 elements");
        refused(r#"{"a":{"shape":[8],"slices":[[0,3,3,1]]}}"#, "slices are of 3 elements, 4 are there");
        refused(r#"{"a":{"shape":[8],"slices":[]}}"#, "slices are of 0 elements, 4 are there");
        refused(r#"{"a":{"shape":[4294967296,4294967296],"slices":[[0,4,4,1]]}}"#, "is too large");
        refused(r#"{"a":{"shape":[8],"slices":[[0,1,18446744073709551615,18446744073709551615]]}}"#, "is no slice");
    }

    #[test]
    fn rank_files_read_back_as_their_group() {
        for (group, rank) in [("model", 0), ("model", 3), ("a-b", 99_999), ("x", 123_456)] {
            assert_eq!(group_of_rank_file(&rank_file_name(group, rank).unwrap()), Some(group));
        }
        assert_eq!(rank_file_name("model", 3).unwrap(), "model-00003.safetensors");
        for name in ["model.safetensors", "model-3.safetensors", "model-+0003.safetensors", "-00003.safetensors"] {
            assert_eq!(group_of_rank_file(name), None, "{name}");
        }
    }

    /// Damage that the checksums would catch first must not get past the header's own checks as a panic.
    #[test]
    fn no_flipped_bit_makes_the_reader_panic() {
        let header = format!(r#"{{"a":{},"b":{}}}"#, entry("F32", "[2]", "[0,8]"), entry("I64", "[]", "[8,16]"));
        let sound = file(header.len() as u64, &header, 16);
        for bit in 0..sound.len() * 8 {
            let mut flipped = sound.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            for place in read_header(&flipped).into_iter().flatten() {
                assert!(place.1.range.end <= flipped.len());
            }
        }
    }
}
