//! Elastic worlds: processes that have lost some of their number meet again, and those that come later join them.
//!
//! A world is an *epoch*: its members, by rank. The first is the one that was started. All others are agreed on in a folder of the run
//! directory, which all hosts share:
//!
//! 1. Whoever is left of an epoch, and whoever wants to join, registers for the next: who it is, where it listens. Then it tries to
//!    reach the others that have registered, and adds whom it reaches.
//! 2. The lowest rank that is left proposes: those that reach each other, if they are more than half of the last epoch without the processes that
//!    are proven dead. A host that cannot be reached may go on by itself, so half is not enough.
//! 3. The file of an epoch appears in one piece and only once (a link that must not exist yet): of two sides that both think that they may go on,
//!    one does.
//!
//! Whoever is not in an epoch that has appeared registers for the one after it, and waits. One that the others did not reach asks them again
//! after a while only, since every try ends their world.

mod agree;
mod error;
mod files;
mod seat;
#[cfg(test)]
mod tests;

pub use error::ElasticError;
pub use files::has_begun;
pub use seat::Seat;

use self::files::{BEGUN, ENDED, job_folder};
use crate::HostError;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{
    JobSecret, JoinError, ProcessCommunicator, Start, Waiting, host_at, join as join_others,
};
use lockstep_exec::comm::{Communicator, ProgramPlace};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64;

/// How many processes may train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elastic {
    /// With fewer the run ends.
    pub least: usize,
    /// More wait as spares.
    pub most: usize,
}

impl Elastic {
    /// `2..4`.
    pub fn parse(text: &str) -> Option<Self> {
        let (least, most) = text.split_once("..")?;
        let (least, most) = (least.trim().parse().ok()?, most.trim().parse().ok()?);
        (1 <= least && least <= most).then_some(Self { least, most })
    }
}

/// A world that was agreed on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Epoch {
    /// Its number.
    pub epoch: u64,
    /// Its members, by rank.
    pub members: Vec<Seat>,
    /// Where rank 0 listens.
    address: String,
    /// What all have in common.
    common: Common,
    /// Those that wanted to be in it, and that not all of its members have reached.
    #[serde(default)]
    unreached: Vec<String>,
    /// When its file was written, by the clock of the host that wrote it, in seconds since 1970.
    #[serde(default)]
    written: f64,
}

/// What the processes of a run must have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Common {
    build: String,
    /// A checksum of the config.
    config: String,
}

/// The members of a next epoch, and the names of those that want to be in it and that they do not reach.
type Proposal = (Vec<Seat>, Vec<String>);

/// What a process says when it registers.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Registered {
    seat: Seat,
    /// Its rank in the last epoch, if it was in it.
    rank: Option<usize>,
    common: Common,
    listens: SocketAddr,
    /// Names of those that it has reached, of those it has tried.
    reached: BTreeSet<String>,
    tried: BTreeSet<String>,
    /// Whether a world that is under way ends for it.
    asks: bool,
}

/// This process among those that come and go.
pub struct Membership {
    folder: PathBuf,
    me: Seat,
    ip: IpAddr,
    last: Option<Epoch>,
    bounds: Elastic,
    /// The process may not have been in the epoch that is there: it waits for the next.
    newest: u64,
    timeout: Duration,
    common: Common,
    secret: JobSecret,
    /// Since when the others do not reach it, and how long it waits from then on before it asks them again.
    unreached: Option<(Instant, Duration)>,
    /// When the folder was last looked at for those that want to join.
    looked: Instant,
}

/// A world that has been joined again.
pub struct Rejoined {
    /// Its communicator.
    pub comm: ProcessCommunicator,
    /// Its number.
    pub epoch: u64,
    /// Ranks of the last epoch that are not in this one; none where this process was not in it.
    pub gone: Vec<usize>,
    /// Processes that were not in the last epoch.
    pub joined: usize,
}

/// How long those that are left wait for others of which nothing proves that they are gone.
const SETTLES_WITHIN: Duration = Duration::from_secs(5);
/// How long a connection may take.
const REACHED_WITHIN: Duration = Duration::from_secs(2);
/// How often the folder is looked at by who waits for others.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// And by a run whose steps go on.
const LOOK_BESIDE_STEPS: Duration = Duration::from_secs(1);

/// How long one that was not reached waits before it asks again; twice as long each time, up to the most.
const ASKS_AFTER: Duration = Duration::from_secs(10);
const ASKS_WITHIN: Duration = Duration::from_secs(600);

impl Membership {
    /// This process in the world that was started, which is epoch 0.
    pub fn first(
        run_dir: &Path,
        (bounds, config): (Elastic, &str),
        start: &Start,
        comm: &ProcessCommunicator,
    ) -> Result<Self, HostError> {
        let mut this = Self::new(run_dir, (bounds, config), start, comm.secret().clone());
        let seat = serde_json::to_vec(&this.me).unwrap_or_default();
        let all = comm.exchange(ProgramPlace::outside("elastic"), &seat).map_err(ExecError::from)?;
        let members = all.iter().filter_map(|seat| serde_json::from_slice(seat).ok()).collect();
        let (address, unreached) = (String::new(), Vec::new());
        let epoch = Epoch { epoch: 0, members, address, common: this.common.clone(), unreached, written: 0.0 };
        if comm.rank() == 0 {
            this.make_folder()?;
            this.publish(&epoch)?;
        }
        this.last = Some(epoch);
        Ok(this)
    }

    /// This process, which wants to join a run that is under way.
    pub fn late(run_dir: &Path, of: (Elastic, &str), start: &Start, secret: JobSecret) -> Self {
        Self::new(run_dir, of, start, secret)
    }

    fn new(run_dir: &Path, (bounds, config): (Elastic, &str), start: &Start, secret: JobSecret) -> Self {
        Self {
            folder: job_folder(run_dir, &secret),
            me: Seat::of_this_process(),
            ip: own_address(&start.address),
            last: None,
            bounds,
            newest: 0,
            timeout: start.timeout,
            common: Common { build: start.build.clone(), config: format!("{:016x}", xxh3_64(config.as_bytes())) },
            secret,
            unreached: None,
            looked: Instant::now(),
        }
    }

    /// The number of the world that this process is in.
    pub fn epoch(&self) -> u64 {
        self.last.as_ref().map_or(self.newest, |last| last.epoch)
    }

    /// How many wait to join. Looks now and then only: none in between.
    pub fn waiting(&mut self) -> usize {
        if self.looked.elapsed() < LOOK_BESIDE_STEPS {
            return 0;
        }
        self.looked = Instant::now();
        let Some(last) = &self.last else { return 0 };
        let places = self.bounds.most.saturating_sub(last.members.len());
        let waits = |other: &&Registered| other.rank.is_none() && other.asks && other.common == self.common;
        self.registered(last.epoch + 1).iter().filter(waits).count().min(places)
    }

    /// Removes what earlier jobs have left in the run directory. Only who has that directory to itself may do so.
    pub fn clear_others(&self) {
        let others = self.folder.parent().and_then(|root| fs::read_dir(root).ok()).into_iter().flatten().flatten();
        for other in others.map(|entry| entry.path()).filter(|path| *path != self.folder) {
            // What cannot be removed does no harm.
            let _ = fs::remove_dir_all(other);
        }
    }

    /// Says that a world has begun: what the command line asks for once is done.
    pub fn begin(&self) {
        // Where it cannot be written, those that wait do it again, which the others refuse.
        let _ = fs::write(self.folder.join(BEGUN), []);
    }

    /// Whether a world has begun.
    pub fn has_begun(&self) -> bool {
        self.folder.join(BEGUN).exists()
    }

    /// Says that the run has ended, to whoever waits to join it.
    pub fn end(&self) {
        // Where it cannot be written, they are ended by whoever started them.
        let _ = fs::write(self.folder.join(ENDED), []);
    }

    /// Meets those that are left of the last epoch, and those that want to join. `told` is called if the others go on without this process, which then
    /// waits to join them.
    pub fn meet(&mut self, waiting: &Waiting, told: &mut dyn FnMut()) -> Result<Rejoined, HostError> {
        loop {
            let (listener, mine) = self.register()?;
            let agreed = self.agree(&mine, waiting)?;
            let Some(rank) = agreed.members.iter().position(|seat| seat.id == self.me.id) else {
                // It was not waited for, or not reached.
                told();
                (self.newest, self.last) = (agreed.epoch, None);
                self.left_out(&agreed);
                continue;
            };
            let joined = self.connect(rank, &agreed, Some(listener), waiting);
            let before = self.last.replace(agreed.clone());
            match joined {
                Ok(comm) => {
                    self.unreached = None;
                    let members = before.map_or_else(Vec::new, |before| before.members);
                    let is_there = |seat: &Seat, of: &[Seat]| of.iter().any(|other| other.id == seat.id);
                    let gone = (0..members.len()).filter(|&rank| !is_there(&members[rank], &agreed.members)).collect();
                    let joined = agreed.members.iter().filter(|seat| !is_there(seat, &members)).count();
                    self.looked = Instant::now();
                    return Ok(Rejoined { comm, epoch: agreed.epoch, gone, joined });
                }
                Err(JoinError::Stopped) => return Err(ElasticError::Stopped.into()),
                // Somebody was lost on the way: those that are left meet again.
                Err(_) => {}
            }
        }
    }

    /// The world of the first `used` ranks of one; none for the others, who wait. All ranks call this together.
    pub fn narrow(
        &mut self,
        comm: ProcessCommunicator,
        used: usize,
        waiting: &Waiting,
    ) -> Result<Option<ProcessCommunicator>, HostError> {
        let Some(last) = self.last.clone().filter(|_| used < comm.ranks()) else { return Ok(Some(comm)) };
        let rank = comm.rank();
        let listener = match rank {
            0 => Some(self.listen()?),
            _ => None,
        };
        let address = listener.as_ref().map_or_else(String::new, |(_, address)| address.to_string());
        let told = comm.exchange(ProgramPlace::outside("elastic"), address.as_bytes()).map_err(ExecError::from)?;
        let address = String::from_utf8_lossy(&told[0]).into_owned();
        let (members, common) = (last.members[..used].to_vec(), self.common.clone());
        let epoch = Epoch { epoch: last.epoch + 1, members, address, common, unreached: Vec::new(), written: 0.0 };
        if rank == 0 {
            self.publish(&epoch)?;
        }
        drop(comm);
        if rank >= used {
            (self.newest, self.last) = (epoch.epoch, None);
            return Ok(None);
        }
        let joined = self.connect(rank, &epoch, listener.map(|(listener, _)| listener), waiting);
        self.last = Some(epoch);
        Ok(Some(joined?))
    }

    /// Joins the others of an epoch, as long as none of them is proven dead. The first has the listener that they come to.
    fn connect(
        &self,
        rank: usize,
        epoch: &Epoch,
        listener: Option<TcpListener>,
        waiting: &Waiting,
    ) -> Result<ProcessCommunicator, JoinError> {
        let abandoned = Arc::new(AtomicBool::new(false));
        let start = Start {
            rank,
            ranks: epoch.members.len(),
            address: epoch.address.clone(),
            timeout: self.timeout,
            build: self.common.build.clone(),
            mpi: None,
            secret: Some(self.secret.clone()),
            board: None,
            waiting: Waiting { abandoned: Some(abandoned.clone()), ..waiting.clone() },
        };
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Where there is no thread for it, those that are gone are waited for until the time is up.
            let watch = std::thread::Builder::new().name("lockstep-dead".into());
            let _ = watch.spawn_scoped(scope, || {
                while !done.load(Ordering::Acquire) {
                    if epoch.members.iter().any(|seat| seat.is_proven_dead(&self.me)) {
                        abandoned.store(true, Ordering::Release);
                    }
                    std::thread::sleep(LOOK_EVERY);
                }
            });
            let joined = match listener {
                Some(listener) if rank == 0 => host_at(&start, listener),
                _ => join_others(&start),
            };
            done.store(true, Ordering::Release);
            joined
        })
    }

    fn listen(&self) -> Result<(TcpListener, SocketAddr), HostError> {
        let listener = TcpListener::bind((self.ip, 0)).or_else(|_| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
        let bound = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
        let (address, listener) = bound.map_err(|cause| self.failed("listen for", &self.folder, cause))?;
        Ok((listener, address))
    }

    /// The number of the next epoch for this process.
    fn next(&self) -> u64 {
        self.last.as_ref().map_or_else(|| self.newest_there(), |last| last.epoch) + 1
    }

    /// Registers for the next epoch, and listens.
    fn register(&self) -> Result<(TcpListener, Registered), HostError> {
        self.make_folder()?;
        let (listener, listens) = self.listen()?;
        let rank = self.last.as_ref().and_then(|last| last.members.iter().position(|seat| seat.id == self.me.id));
        let mine = Registered {
            seat: self.me.clone(),
            rank,
            common: self.common.clone(),
            listens,
            reached: BTreeSet::new(),
            tried: BTreeSet::new(),
            asks: self.asks(),
        };
        Ok((listener, mine))
    }
}

/// The address by which others reach this host: that from which it reaches where rank 0 was started. Nothing is sent.
fn own_address(first: &str) -> IpAddr {
    let of = |to: SocketAddr| {
        let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], 0).into() } else { ([0u16; 8], 0).into() };
        let socket = UdpSocket::bind(any)?;
        socket.connect(to)?;
        socket.local_addr().map(|address| address.ip())
    };
    let found = first.to_socket_addrs().ok().and_then(|mut all| all.find_map(|to| of(to).ok()));
    found.unwrap_or(Ipv4Addr::LOCALHOST.into())
}
