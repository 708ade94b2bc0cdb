//! Parquet files that are damaged or made up: read or refused, in bounded time and memory, never a panic. One test alone
//! in its process: it watches the whole process's allocations.

mod common;

use lockstep_ir::Hint;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::{Case, fixture, mutate};
use lockstep_data::{PrepareOptions, prepare_with};
use lockstep_ir::counter;

/// The test stops after this long, so a slow machine tests less rather than longer.
const TIME: Duration = Duration::from_secs(4);

/// The files have some kilobytes; the largest page that is accepted has 256 MiB.
const MOST_BYTES: usize = 260 << 20;

struct Watching;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// A mutation for a round: bytes anywhere, bytes of the footer, its length, sizes in page headers, bytes of pages.
fn damaged(good: &[u8], round: u64) -> Vec<u8> {
    let draw = |i: u64, below: usize| (counter::bits(counter::key(round, "parquet"), i) % below as u64) as usize;
    let length = good.len() - 8;
    let footer = length - u32::from_le_bytes([0, 1, 2, 3].map(|i| good[length + i])) as usize;
    let mut bytes = good.to_vec();
    match round % 5 {
        0 => return mutate(good, round),
        1 => {
            // Numbers of the metadata are varints: every bit counts.
            for i in 0..1 + draw(0, 3) as u64 {
                bytes[footer + draw(1 + 2 * i, length - footer)] ^= 1 << draw(2 + 2 * i, 8);
            }
        }
        2 => {
            let absurd = [0, 1, 7, length as u32, length as u32 + 1, 1 << 20, i32::MAX as u32, 1 << 31, u32::MAX];
            bytes[length..length + 4].copy_from_slice(&absurd[draw(0, absurd.len())].to_le_bytes());
        }
        3 => {
            // A page header holds, as varints, its type and its sizes before and after compression; the column of text is
            // the second, so that any page may be its.
            let pages: Vec<usize> = (4..footer - 5).filter(|&at| bytes[at] == 0x15 && bytes[at + 2] == 0x15).collect();
            let page = pages[draw(0, pages.len())];
            let sizes: Vec<usize> = (page..footer.min(page + 24)).filter(|&at| bytes[at] == 0x15).collect();
            let at = sizes[draw(1, sizes.len())] + 1;
            let absurd =
                [[0xfe, 0xff, 0xff, 0xff, 0x0f], [0xff, 0xff, 0xff, 0xff, 0x0f], [0x80, 0x80, 0x80, 0x80, 0x08]];
            let end = at + 1 + bytes[at..footer].iter().take_while(|byte| **byte >= 0x80).count();
            bytes.splice(at..end.min(footer), absurd[draw(2, 3)]);
        }
        _ => {
            // The pages: their headers hold sizes and counts.
            for i in 0..1 + draw(0, 3) as u64 {
                bytes[4 + draw(1 + 2 * i, footer - 4)] = [0xff, 0x7f, 0x80, 0][draw(2 + 2 * i, 4)];
            }
        }
    }
    bytes
}

#[test]
fn damaged_parquet_files_are_refused_in_bounded_memory() {
    let case = Case::new(&[]);
    let codecs = ["snappy", "zstd", "gzip", "brotli", "lz4"];
    let files = codecs.map(|codec| fs::read(fixture(&format!("rows.{codec}.bin"))).unwrap());
    let spec = case.spec(&["a.parquet"]);
    let options = PrepareOptions { threads: 1, ..PrepareOptions::default() };
    let start = Instant::now();
    let (mut read, mut refused) = (0, 0);
    for round in 0.. {
        if round >= 200 && start.elapsed() > TIME {
            break;
        }
        let bytes = damaged(&files[round as usize / 5 % files.len()], round);
        fs::write(case.path("a.parquet"), &bytes).unwrap();
        LARGEST.store(0, Ordering::Relaxed);
        let began = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| {
            prepare_with(&spec, &case.path("out"), &options, &mut |_| ()).map_err(|error| error.with_hint())
        }));
        let largest = LARGEST.load(Ordering::Relaxed);
        assert!(largest <= MOST_BYTES, "round {round}: {largest} bytes at once, {result:?}");
        assert!(began.elapsed() < Duration::from_secs(2), "round {round}: {:?}", began.elapsed());
        match result {
            Ok(Ok(_)) => read += 1,
            Ok(Err(text)) => {
                let named = text.starts_with(case.path("a.parquet").to_str().unwrap());
                assert!(named && text.contains("\nhint: ") && !text.contains('\u{1b}'), "round {round}: {text}");
                refused += 1;
            }
            Err(_) => panic!("round {round} panicked"),
        }
    }
    assert!(refused > read && read > 0, "{refused} refused, {read} read");
}
