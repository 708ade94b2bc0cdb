//! How those who have registered agree on the next world.

use super::files::ENDED;
use super::{
    ASKS_AFTER, ASKS_WITHIN, Common, ElasticError, Epoch, LOOK_EVERY, Membership, Proposal, REACHED_WITHIN, Registered,
    SETTLES_WITHIN, Seat,
};
use crate::{HostError, clock};
use lockstep_exec::comm::processes::Waiting;
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::time::Instant;

impl Membership {
    /// Waits until there is a next epoch; proposes it where that is this process's part.
    pub(super) fn agree(&mut self, mine: &Registered, waiting: &Waiting) -> Result<Epoch, HostError> {
        let (mut mine, mut written) = (mine.clone(), None);
        let (mut begun, mut waits_for_nobody) = (Instant::now(), false);
        let mut number = self.next();
        let mut looked_at = None;
        loop {
            if mine.rank.is_none()
                && looked_at != Some(number - 1)
                && let Some(epoch) = self.read_epoch(number - 1)
            {
                self.may_join(&epoch)?;
                looked_at = Some(number - 1);
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
                let epoch = Epoch { epoch: number, members, address, common, unreached, written: 0.0 };
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
    pub(super) fn left_out(&mut self, of: &Epoch) {
        if of.unreached.contains(&self.me.id) {
            let waits = self.unreached.map_or(ASKS_AFTER, |(_, waits)| ASKS_WITHIN.min(2 * waits));
            self.unreached = Some((Instant::now(), waits));
        }
    }

    /// Whether a world that is under way is to end for this process.
    pub(super) fn asks(&self) -> bool {
        self.unreached.is_none_or(|(since, waits)| since.elapsed() > waits)
    }

    /// The members of the next epoch, and those that they do not reach, if it is this process that proposes them and nobody is waited for any
    /// more.
    pub(super) fn proposal(
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
    pub(super) fn is_gone(&self, epoch: &Epoch) -> bool {
        epoch.members.iter().all(|seat| seat.is_proven_dead(&self.me))
    }

    /// Tries to reach those that were not tried yet. Says whether there is news.
    pub(super) fn reach(&self, mine: &mut Registered, others: &[Registered]) -> bool {
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

    /// Refuses to join a run of another build or config, or one whose hosts have another time.
    pub(super) fn may_join(&self, epoch: &Epoch) -> Result<(), ElasticError> {
        let Common { build, config } = &epoch.common;
        if *build != self.common.build {
            return Err(ElasticError::OtherBuild { theirs: build.clone(), ours: self.common.build.clone() });
        }
        if *config != self.common.config {
            return Err(ElasticError::OtherConfig);
        }
        let here = clock::ahead_here(&self.folder.join(format!(".clock-{}", self.me.id)));
        let there = clock::ahead_of_files(epoch.written, &self.epoch_path(epoch.epoch)).filter(|_| epoch.written > 0.0);
        let apart = here.zip(there).and_then(|(here, there)| clock::far_apart(here - there));
        apart.map_or(Ok(()), |apart| Err(ElasticError::OtherClock { apart }))
    }
}
