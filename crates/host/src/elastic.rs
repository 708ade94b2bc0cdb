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

mod error;
mod seat;
#[cfg(test)]
mod tests;

pub use error::ElasticError;
pub use seat::Seat;

use crate::HostError;
use lockstep_exec::ExecError;
use lockstep_exec::comm::processes::{
    JobSecret, JoinError, ProcessCommunicator, Start, Waiting, host_at, join as join_others,
};
use lockstep_exec::comm::{Communicator, ProgramPlace};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
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

/// The folder of epochs in a run directory.
const FOLDER: &str = ".elastic";
/// The file that says that a world has begun.
const BEGUN: &str = "begun";
/// The file that says that the run has ended.
const ENDED: &str = "ended";

/// Whether the run of a job has begun: processes that come now join it later.
pub fn has_begun(run_dir: &Path, secret: &JobSecret) -> bool {
    job_folder(run_dir, secret).join("epoch-0.json").exists()
}

/// Whoever does not know the secret does not find the folder of the job among those of others.
fn job_folder(run_dir: &Path, secret: &JobSecret) -> PathBuf {
    run_dir.join(FOLDER).join(format!("{:016x}", xxh3_64(secret.to_hex().as_bytes())))
}

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
        let epoch = Epoch { epoch: 0, members, address, common: this.common.clone(), unreached };
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
        let epoch = Epoch { epoch: last.epoch + 1, members, address, common, unreached: Vec::new() };
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

    /// The newest epoch that has appeared.
    fn newest_there(&self) -> u64 {
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let number = |name: String| name.strip_prefix("epoch-")?.strip_suffix(".json")?.parse().ok();
        names.filter_map(|entry| number(entry.file_name().into_string().ok()?)).max().unwrap_or(0)
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

    /// Waits until there is a next epoch; proposes it where that is this process's part.
    fn agree(&mut self, mine: &Registered, waiting: &Waiting) -> Result<Epoch, HostError> {
        let (mut mine, mut written) = (mine.clone(), None);
        let (mut begun, mut waits_for_nobody) = (Instant::now(), false);
        let mut number = self.next();
        loop {
            if mine.rank.is_none()
                && let Some(epoch) = self.read_epoch(number - 1)
            {
                self.may_join(&epoch)?;
            }
            mine.asks = self.asks();
            if written != Some((number, mine.asks)) {
                // One that waits to join follows the run from epoch to epoch.
                self.write_registration(number, &mine)?;
                written = Some((number, mine.asks));
            }
            if let Some(epoch) = self.read_epoch(number) {
                if mine.rank.is_some() || epoch.members.iter().any(|seat| seat.id == self.me.id) {
                    return Ok(epoch);
                }
                self.newest = epoch.epoch;
                self.left_out(&epoch);
                number = self.next().max(number + 1);
                // The others listen somewhere else by then.
                mine.tried.clear();
                mine.reached.clear();
                continue;
            }
            if self.folder.join(ENDED).exists() {
                return Err(ElasticError::Ended.into());
            }
            if waiting.stop.as_ref().is_some_and(|stop| stop.load(Ordering::SeqCst)) {
                return Err(ElasticError::Stopped.into());
            }
            let others = self.registered(number);
            if self.reach(&mut mine, &others) {
                self.write_registration(number, &mine)?;
            }
            // Those that wait to join begin by themselves where all that they could join are gone.
            let last = self.last.clone().or_else(|| self.read_epoch(number - 1).filter(|last| self.is_gone(last)));
            if mine.rank.is_none() && last.is_some() && !waits_for_nobody {
                // The time in which others may come counts from here.
                (begun, waits_for_nobody) = (Instant::now(), true);
            }
            if let Some(last) = last
                && let Some((members, unreached)) = self.proposal(&last, &mine, &others, begun)?
            {
                let (address, common) = (mine.listens.to_string(), self.common.clone());
                let epoch = Epoch { epoch: number, members, address, common, unreached };
                self.publish(&epoch)?;
                continue;
            }
            if mine.rank.is_some() && begun.elapsed() > self.timeout + 2 * SETTLES_WITHIN {
                return Err(ElasticError::Alone { within: begun.elapsed() }.into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// An epoch has appeared without this process.
    fn left_out(&mut self, of: &Epoch) {
        if of.unreached.contains(&self.me.id) {
            let waits = self.unreached.map_or(ASKS_AFTER, |(_, waits)| ASKS_WITHIN.min(2 * waits));
            self.unreached = Some((Instant::now(), waits));
        }
    }

    /// Whether a world that is under way is to end for this process.
    fn asks(&self) -> bool {
        self.unreached.is_none_or(|(since, waits)| since.elapsed() > waits)
    }

    /// The members of the next epoch, and those that they do not reach, if it is this process that proposes them and nobody is waited for any
    /// more.
    fn proposal(
        &self,
        last: &Epoch,
        mine: &Registered,
        others: &[Registered],
        begun: Instant,
    ) -> Result<Option<Proposal>, HostError> {
        let settled = begun.elapsed() > SETTLES_WITHIN;
        let there: Vec<&Registered> = others.iter().filter(|other| other.common == self.common).collect();
        let is_there = |seat: &Seat| seat.id == self.me.id || there.iter().any(|other| other.seat.id == seat.id);
        let alive: Vec<&Seat> = last.members.iter().filter(|seat| !seat.is_proven_dead(&self.me)).collect();
        if !settled && !alive.iter().all(|seat| is_there(seat)) {
            return Ok(None);
        }
        // Whom all of those before reach, by rank; those that join come last.
        let mut sorted: Vec<&Registered> = there;
        sorted.push(mine);
        sorted.sort_by_key(|other| (other.rank.unwrap_or(usize::MAX), other.seat.id.clone()));
        sorted.retain(|other| other.seat.id == self.me.id || !other.seat.is_proven_dead(&self.me));
        let asked = |a: &Registered, b: &Registered| a.tried.contains(&b.seat.id);
        let known = |a: &Registered, b: &Registered| asked(a, b) && asked(b, a);
        let pairs = || sorted.iter().enumerate().flat_map(|(i, a)| sorted[..i].iter().map(move |b| (*a, *b)));
        if !settled && !pairs().all(|(a, b)| known(a, b)) {
            return Ok(None);
        }
        let reach = |a: &Registered, b: &Registered| a.reached.contains(&b.seat.id) && b.reached.contains(&a.seat.id);
        let (mut members, mut unreached): (Vec<&Registered>, _) = (vec![mine], Vec::new());
        for other in sorted.iter().copied().filter(|other| other.seat.id != self.me.id) {
            if members.iter().all(|member| reach(member, other)) {
                members.push(other);
            } else if members.iter().any(|member| known(member, other) && !reach(member, other)) {
                unreached.push(other.seat.id.clone());
            }
        }
        members.sort_by_key(|member| (member.rank.unwrap_or(usize::MAX), member.seat.id.clone()));
        // The lowest rank that is reached proposes; where that does not happen, the next.
        if members[0].seat.id != self.me.id && begun.elapsed() <= 2 * SETTLES_WITHIN {
            return Ok(None);
        }
        // Where all are gone, those that come are given time.
        let few = members.len() < self.bounds.least && begun.elapsed() <= 2 * SETTLES_WITHIN;
        if alive.is_empty() && (!settled || few) {
            return Ok(None);
        }
        let old = members.iter().filter(|member| member.rank.is_some()).count();
        if old < alive.len() && 2 * old <= alive.len() {
            return match begun.elapsed() > self.timeout.min(2 * SETTLES_WITHIN) {
                true => Err(ElasticError::NoMajority { here: old, before: last.members.len() }.into()),
                false => Ok(None),
            };
        }
        members.truncate(self.bounds.most);
        if members.len() < self.bounds.least {
            let (here, before, least) = (members.len(), last.members.len(), self.bounds.least);
            return Err(ElasticError::TooFew { here, before, least }.into());
        }
        Ok(Some((members.into_iter().map(|member| member.seat.clone()).collect(), unreached)))
    }

    /// Whether all members of an epoch are proven dead.
    fn is_gone(&self, epoch: &Epoch) -> bool {
        epoch.members.iter().all(|seat| seat.is_proven_dead(&self.me))
    }

    /// Tries to reach those that were not tried yet. Says whether there is news.
    fn reach(&self, mine: &mut Registered, others: &[Registered]) -> bool {
        let mut news = false;
        for other in others {
            if mine.tried.insert(other.seat.id.clone()) {
                news = true;
                if TcpStream::connect_timeout(&other.listens, REACHED_WITHIN).is_ok() {
                    mine.reached.insert(other.seat.id.clone());
                }
            }
        }
        news
    }

    /// The others that have registered for an epoch.
    fn registered(&self, number: u64) -> Vec<Registered> {
        let prefix = format!("here-{number}-");
        let names = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let is_one = |name: &str| name.starts_with(&prefix) && name.ends_with(".json");
        let read = |entry: fs::DirEntry| -> Option<Registered> {
            entry.file_name().to_str().filter(|name| is_one(name))?;
            serde_json::from_slice(&fs::read(entry.path()).ok()?).ok()
        };
        let mut all: Vec<Registered> = names.filter_map(read).filter(|other| other.seat.id != self.me.id).collect();
        all.retain(|other| !other.seat.is_proven_dead(&self.me));
        all
    }

    /// Refuses to join a run of another build or config.
    fn may_join(&self, epoch: &Epoch) -> Result<(), ElasticError> {
        let Common { build, config } = &epoch.common;
        if *build != self.common.build {
            return Err(ElasticError::OtherBuild { theirs: build.clone(), ours: self.common.build.clone() });
        }
        if *config != self.common.config { Err(ElasticError::OtherConfig) } else { Ok(()) }
    }

    fn write_registration(&self, number: u64, mine: &Registered) -> Result<(), HostError> {
        let path = self.folder.join(format!("here-{number}-{}.json", self.me.id));
        let text = serde_json::to_vec(mine).unwrap_or_default();
        let new = self.folder.join(format!(".here-{}", self.me.id));
        let written = write_private(&new, &text).and_then(|()| fs::rename(&new, &path));
        written.map_err(|cause| self.failed("write", &path, cause))
    }

    fn read_epoch(&self, number: u64) -> Option<Epoch> {
        serde_json::from_slice(&fs::read(self.epoch_path(number)).ok()?).ok()
    }

    fn epoch_path(&self, number: u64) -> PathBuf {
        self.folder.join(format!("epoch-{number}.json"))
    }

    /// Has an epoch appear, in one piece. Where there is one of its number already, that one counts.
    fn publish(&self, epoch: &Epoch) -> Result<(), HostError> {
        let (new, path) = (self.folder.join(format!(".epoch-{}", self.me.id)), self.epoch_path(epoch.epoch));
        let text = serde_json::to_vec(epoch).unwrap_or_default();
        let linked = write_private(&new, &text).and_then(|()| match fs::hard_link(&new, &path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        });
        let _ = fs::remove_file(&new);
        linked.map_err(|cause| self.failed("write", &path, cause))
    }

    fn make_folder(&self) -> Result<(), HostError> {
        fs::create_dir_all(&self.folder).map_err(|cause| self.failed("create", &self.folder, cause))
    }

    fn failed(&self, action: &'static str, path: &Path, cause: io::Error) -> HostError {
        ElasticError::Folder { action, path: path.to_owned(), cause }.into()
    }
}

/// Writes a file anew.
fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
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
