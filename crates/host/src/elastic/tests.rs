//! Who goes on, and who ends.

use super::*;
use crate::clock;
use lockstep_ir::Hint;

fn common() -> Common {
    Common { build: "0.1".into(), config: "c".into() }
}

/// A process of a host that nobody here can look into.
fn seat(name: &str) -> Seat {
    Seat { id: name.into(), host: name.into(), pid: 1, pids: "elsewhere".into(), began: 1 }
}

fn registered(name: &str, rank: Option<usize>, reached: &[&str], tried: &[&str]) -> Registered {
    let names = |of: &[&str]| of.iter().map(|name| (*name).to_owned()).collect();
    let listens = "127.0.0.1:1".parse().unwrap();
    let (reached, tried) = (names(reached), names(tried));
    Registered { seat: seat(name), rank, common: common(), listens, reached, tried, asks: true }
}

fn member(folder: &Path, name: &str, bounds: Elastic) -> Membership {
    Membership {
        folder: folder.to_owned(),
        me: seat(name),
        ip: Ipv4Addr::LOCALHOST.into(),
        last: None,
        bounds,
        newest: 0,
        timeout: Duration::from_secs(60),
        common: common(),
        secret: JobSecret::from_hex(&"5e".repeat(32)).unwrap(),
        unreached: None,
        looked: Instant::now(),
    }
}

fn epoch(number: u64, names: &[&str], unreached: &[&str]) -> Epoch {
    let unreached = unreached.iter().map(|name| (*name).to_owned()).collect();
    let members = names.iter().map(|name| seat(name)).collect();
    Epoch { epoch: number, members, address: String::new(), common: common(), unreached, written: 0.0 }
}

/// What `a` proposes after a time, of those that have registered: the members, and after "without" those that they do not reach.
fn proposed(
    others: &[Registered],
    reached: &[&str],
    least: usize,
    after: Duration,
) -> Result<Option<Vec<String>>, String> {
    let names = ["a", "b", "c", "d"];
    let me = member(Path::new("/nowhere"), "a", Elastic { least, most: 4 });
    let last = epoch(0, &names, &[]);
    let tried: Vec<&str> = others.iter().map(|other| other.seat.id.as_str()).collect();
    let mine = registered("a", Some(0), reached, &tried);
    let begun = Instant::now().checked_sub(after).unwrap();
    match me.proposal(&last, &mine, others, begun) {
        Ok(found) => Ok(found.map(|(seats, unreached)| {
            let without = if unreached.is_empty() { vec![] } else { [vec!["without".to_owned()], unreached].concat() };
            seats.into_iter().map(|seat| seat.id).chain(without).collect()
        })),
        Err(error) => Err(error.with_hint()),
    }
}

#[test]
fn bounds_are_two_numbers() {
    assert_eq!(Elastic::parse("2..4"), Some(Elastic { least: 2, most: 4 }));
    for wrong in ["", "2", "4..2", "0..2", "2..", "a..b", "2-4"] {
        assert_eq!(Elastic::parse(wrong), None, "{wrong}");
    }
}

#[test]
fn those_that_reach_each_other_go_on_if_they_are_more_than_half() {
    let all = ["a", "b", "c", "d"];
    let (soon, late) = (Duration::ZERO, Duration::from_secs(6));
    let b = || registered("b", Some(1), &["a", "c"], &all);
    let c = || registered("c", Some(2), &["a", "b"], &all);
    // Rank 3 is waited for, as nothing proves that it is gone.
    assert_eq!(proposed(&[b(), c()], &["b", "c"], 1, soon), Ok(None));
    let names = |names: &[&str]| Ok(Some(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()));
    assert_eq!(proposed(&[b(), c()], &["b", "c"], 1, late), names(&["a", "b", "c"]));
    // One that joins comes last; one that not all reach does not join.
    let e = registered("e", None, &["a", "b", "c"], &all);
    let seen = |name, reached: &[&str]| {
        let rank = all.iter().position(|other| *other == name);
        registered(name, rank, reached, &["a", "b", "c", "d", "e"])
    };
    let (b_sees, c_sees) = (seen("b", &["a", "c", "e"]), seen("c", &["a", "b", "e"]));
    assert_eq!(proposed(&[e.clone(), b_sees.clone(), c_sees], &["b", "c", "e"], 1, late), names(&["a", "b", "c", "e"]));
    let c_cut = seen("c", &["a", "b"]);
    assert_eq!(proposed(&[e, b_sees, c_cut], &["b", "c", "e"], 1, late), names(&["a", "b", "c", "without", "e"]));
    // One that has tried nobody yet is only late.
    let new = registered("e", None, &[], &[]);
    assert_eq!(proposed(&[new, b(), c()], &["b", "c"], 1, late), names(&["a", "b", "c"]));
    // Halves end: the other may go on.
    let later = Duration::from_secs(11);
    let half = || registered("b", Some(1), &["a"], &all);
    assert_eq!(proposed(&[half()], &["b"], 1, late), Ok(None));
    let error = proposed(&[half()], &["b"], 1, later).unwrap_err();
    assert!(error.starts_with("2 of 4 ranks reach each other, which is not more than half"), "{error}");
    // And too few end as well.
    let error = proposed(&[b(), c()], &["b", "c"], 4, late).unwrap_err();
    assert!(error.starts_with("3 of 4 ranks are left, and cluster.elastic asks for 4 at least"), "{error}");
}

#[test]
fn of_two_epochs_with_one_number_the_first_counts() {
    let folder = tempfile::tempdir().unwrap();
    let bounds = Elastic { least: 1, most: 4 };
    let (a, b) = (member(folder.path(), "a", bounds), member(folder.path(), "b", bounds));
    a.publish(&epoch(3, &["a"], &[])).unwrap();
    b.publish(&epoch(3, &["b"], &[])).unwrap();
    for member in [&a, &b] {
        assert_eq!(member.read_epoch(3).unwrap().members, [seat("a")]);
    }
    assert_eq!(a.newest_there(), 3);
    // Nothing else is left behind.
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn one_that_is_not_reached_asks_less_and_less_often() {
    let folder = tempfile::tempdir().unwrap();
    let bounds = Elastic { least: 1, most: 4 };
    let (mut a, mut e) = (member(folder.path(), "a", bounds), member(folder.path(), "e", bounds));
    let ago = |duration| Instant::now().checked_sub(duration).unwrap();
    a.last = Some(epoch(1, &["a"], &["e"]));
    let waits = |a: &mut Membership, e: &Membership| {
        let (_, mine) = e.register().unwrap();
        e.write_registration(2, &mine).unwrap();
        a.looked = ago(LOOK_BESIDE_STEPS);
        a.waiting() > 0
    };
    assert!(waits(&mut a, &e));
    // Whoever is left out for another reason asks at once.
    e.left_out(&epoch(1, &["a"], &[]));
    assert!(waits(&mut a, &e));
    for expected in [10, 20, 40, 80, 160, 320, 600, 600] {
        e.left_out(&epoch(1, &["a"], &["e"]));
        let (since, wait) = e.unreached.unwrap();
        assert_eq!(wait, Duration::from_secs(expected));
        assert!(since.elapsed() < wait && !waits(&mut a, &e));
        e.unreached = Some((ago(wait + Duration::from_secs(1)), wait));
        assert!(waits(&mut a, &e));
    }
}

#[test]
fn a_process_is_proven_dead_only_where_it_can_be_looked_for() {
    let me = Seat::of_this_process();
    assert!(!me.is_proven_dead(&me));
    let gone = Seat { id: "gone".into(), pid: me.pid, began: me.began + 1, ..me.clone() };
    assert!(gone.is_proven_dead(&me), "another process has its number now");
    assert!(!Seat { host: "elsewhere".into(), ..gone.clone() }.is_proven_dead(&me));
    assert!(!Seat { pids: "of a container".into(), ..gone }.is_proven_dead(&me));
}

#[test]
fn a_host_with_another_clock_does_not_join() {
    let folder = tempfile::tempdir().unwrap();
    let me = member(folder.path(), "late", Elastic { least: 1, most: 4 });
    let mut running = epoch(3, &["a", "b"], &[]);
    std::fs::write(me.epoch_path(3), "").unwrap();
    for (written, refused) in [(0.0, None), (30.0, None), (3600.0, Some("-3600 s")), (-7200.0, Some("+7200 s"))] {
        // Epochs of an earlier build do not say when they were written.
        running.written = if written == 0.0 { 0.0 } else { clock::now() + written };
        match (me.may_join(&running), refused) {
            (Ok(()), None) => {}
            (Err(error), Some(apart)) => {
                assert_eq!(
                    error.to_string(),
                    format!("the clock of this host differs from the run's by {apart}: it cannot join")
                );
                assert!(error.hint().unwrap().contains("NTP"));
            }
            (said, _) => panic!("{written} s: {said:?}"),
        }
    }
}
