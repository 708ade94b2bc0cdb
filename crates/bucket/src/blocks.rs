//! Blocks of objects: those in memory, those under way, and the threads that fetch ahead.

use crate::cache::DiskCache;
use crate::file::Object;
use crate::http::lock;
use crate::{BucketError, Buckets, Reads};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Bytes of blocks that are held in memory.
const HELD_BYTES: usize = 96 << 20;
/// Threads that fetch ahead.
const THREADS: usize = 16;
/// Blocks that wait for one; what is asked for beyond is fetched when it is read.
const MOST_WAITING: usize = 256;

/// A block of an object.
#[derive(Clone)]
pub(crate) struct Key {
    object: Arc<Object>,
    index: u64,
    name: BlockName,
}

impl Key {
    pub fn new(object: &Arc<Object>, index: u64) -> Self {
        let name = (object.address.to_string(), object.etag.clone(), index);
        Self { object: object.clone(), index, name }
    }
}

/// Address and entity tag of an object, and the number of a block in it.
type BlockName = (String, String, u64);

#[derive(Default)]
pub(crate) struct Blocks {
    state: Mutex<State>,
    changed: Condvar,
    disk: DiskCache,
}

#[derive(Default)]
struct State {
    held: BTreeMap<BlockName, (Arc<[u8]>, u64)>,
    held_bytes: usize,
    /// Counts uses, to know the least recent.
    uses: u64,
    under_way: BTreeSet<BlockName>,
    /// Why a block that somebody waits for did not come.
    failed: BTreeMap<BlockName, BucketError>,
    waiting: VecDeque<Key>,
    threads: usize,
}

impl Blocks {
    /// A block, from memory, from the disk or from the server.
    pub fn get(&self, buckets: &Buckets, key: &Key) -> Result<Arc<[u8]>, BucketError> {
        let mut state = lock(&self.state);
        let mut waited = false;
        loop {
            state.uses += 1;
            let now = state.uses;
            if let Some((block, used)) = state.held.get_mut(&key.name) {
                *used = now;
                return Ok(block.clone());
            }
            if !state.under_way.contains(&key.name) {
                match state.failed.remove(&key.name) {
                    Some(error) if waited => return Err(error),
                    _ => break,
                }
            }
            waited = true;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting.retain(|waiting| waiting.name != key.name);
        state.under_way.insert(key.name.clone());
        drop(state);
        self.load(buckets, key)
    }

    /// Fetches a block soon, unless it is there.
    pub fn expect(self: &Arc<Self>, buckets: &Buckets, key: Key) {
        let mut state = lock(&self.state);
        let known = state.held.contains_key(&key.name)
            || state.under_way.contains(&key.name)
            || state.waiting.iter().any(|waiting| waiting.name == key.name);
        if known || state.waiting.len() >= MOST_WAITING {
            return;
        }
        state.waiting.push_back(key);
        if state.threads >= THREADS {
            return;
        }
        state.threads += 1;
        drop(state);
        let (blocks, own) = (self.clone(), buckets.clone());
        let thread = std::thread::Builder::new().name("lockstep-bucket".into());
        if thread.spawn(move || blocks.work(&own)).is_err() {
            lock(&self.state).threads -= 1;
        }
    }

    /// Fetches what waits, until nothing does.
    fn work(&self, buckets: &Buckets) {
        loop {
            let mut state = lock(&self.state);
            let Some(key) = state.waiting.pop_front() else {
                state.threads -= 1;
                return;
            };
            state.under_way.insert(key.name.clone());
            drop(state);
            // Whoever waits for it hears why it did not come.
            let _ = self.load(buckets, &key);
        }
    }

    /// Brings a block that is marked as under way.
    fn load(&self, buckets: &Buckets, key: &Key) -> Result<Arc<[u8]>, BucketError> {
        let loaded = self.bring(buckets, key);
        let mut state = lock(&self.state);
        state.under_way.remove(&key.name);
        match &loaded {
            Ok(block) => {
                state.uses += 1;
                let now = state.uses;
                state.held_bytes += block.len();
                state.held.insert(key.name.clone(), (block.clone(), now));
                while state.held_bytes > HELD_BYTES && state.held.len() > 1 {
                    let oldest = state.held.iter().min_by_key(|(_, (_, used))| *used).map(|(name, _)| name.clone());
                    let gone = oldest.and_then(|name| state.held.remove(&name));
                    state.held_bytes -= gone.map_or(0, |(block, _)| block.len());
                }
            }
            Err(error) => drop(state.failed.insert(key.name.clone(), error.clone())),
        }
        drop(state);
        self.changed.notify_all();
        loaded
    }

    fn bring(&self, buckets: &Buckets, key: &Key) -> Result<Arc<[u8]>, BucketError> {
        let object = &key.object;
        let (from, bytes) = object.block(key.index);
        let limits = buckets.client.limits();
        let on_disk = object.reads == Reads::Scattered && limits.cache_bytes > 0;
        // The same key elsewhere is another object.
        let server = buckets.client.settings.endpoint.as_deref().unwrap_or_default();
        let name = on_disk.then(|| DiskCache::name(server, &object.address, &object.etag));
        if let Some(name) = &name
            && let Some(block) = self.disk.read(&limits, name, key.index, bytes)
        {
            return Ok(block.into());
        }
        let block = buckets.range(&object.address, &object.etag, from, bytes)?;
        if let Some(name) = &name {
            self.disk.write(&limits, name, key.index, &block);
        }
        Ok(block.into())
    }
}
