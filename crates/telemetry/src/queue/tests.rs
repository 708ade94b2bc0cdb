use super::*;
use serde_json::json;
use std::sync::mpsc;

/// Takes lines, or does not.
#[derive(Clone, Default)]
struct Taker(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    steps: Vec<u64>,
    others: usize,
    down: bool,
    /// A step that is refused.
    bad: Option<u64>,
}

impl Transport for Taker {
    fn name(&self) -> String {
        "the taker".into()
    }

    fn send(&mut self, records: &[Record]) -> Result<(), SendError> {
        let mut taken = self.0.lock().unwrap();
        if taken.down {
            return Err(SendError::Later("it is down".into()));
        }
        let step = |record: &Record| match &record.what {
            What::Metrics(line) => line["step"].as_u64(),
            _ => None,
        };
        let steps: Vec<u64> = records.iter().filter_map(step).collect();
        if taken.bad.is_some_and(|bad| steps.contains(&bad)) {
            return Err(SendError::Refused("no such step".into()));
        }
        taken.others += records.len() - steps.len();
        taken.steps.extend(steps);
        Ok(())
    }

    fn state(&self) -> Value {
        json!("kept")
    }
}

fn open(folder: &Path, taker: &Taker) -> Box<dyn Sink> {
    SendQueue::open(folder, json!({ "step": 0 }), |_| Ok(taker.clone())).unwrap()
}

fn write(queue: &mut Box<dyn Sink>, steps: std::ops::RangeInclusive<u64>) {
    steps.for_each(|step| queue.write(&format!("{{\"step\":{step},\"loss\":0.5}}")).unwrap());
}

#[test]
fn lines_arrive_in_order_and_one_that_is_refused_is_left_out_and_told() {
    let folder = tempfile::tempdir().unwrap();
    let taker = Taker::default();
    taker.0.lock().unwrap().bad = Some(70);
    let mut queue = open(folder.path(), &taker);
    write(&mut queue, 1..=300);
    queue.event("{\"event\":\"validation\",\"step\":300}").unwrap();
    queue.event("{\"event\":\"checkpoint\",\"step\":300}").unwrap();
    let told = queue.end(RunEnd::Finished);
    assert_eq!(told.as_deref(), Some("the taker did not take 1 lines of metrics and events: no such step"));
    let taken = taker.0.lock().unwrap();
    assert_eq!(taken.steps, (1..=300).filter(|step| *step != 70).collect::<Vec<_>>());
    // Its start, the checkpoint, its end.
    assert_eq!(taken.others, 3);
}

#[test]
fn what_was_not_sent_waits_for_the_next_start_also_after_a_kill() {
    let folder = tempfile::tempdir().unwrap();
    let taker = Taker::default();
    taker.0.lock().unwrap().down = true;
    let mut queue = open(folder.path(), &taker);
    write(&mut queue, 1..=20);
    let told = queue.end(RunEnd::Failed).unwrap();
    assert!(
        told.starts_with("22 lines of metrics and events were not sent to the taker: it is down; they are in "),
        "{told}"
    );
    // A kill in the middle of a line.
    let mut file = File::options().append(true).open(folder.path().join(QUEUE)).unwrap();
    file.write_all(b"{\"unix_ms\":5,\"metr").unwrap();
    taker.0.lock().unwrap().down = false;
    let mut queue = open(folder.path(), &taker);
    write(&mut queue, 21..=30);
    assert_eq!(queue.end(RunEnd::Finished), None);
    let taken = taker.0.lock().unwrap();
    assert_eq!((taken.steps.clone(), taken.others), ((1..=30).collect(), 4));
    let kept: Kept = serde_json::from_slice(&fs::read(folder.path().join(STATE)).unwrap()).unwrap();
    let length = fs::metadata(folder.path().join(QUEUE)).unwrap().len();
    assert_eq!((kept.sent, kept.state), (length, json!("kept")));
}

#[test]
fn a_queue_that_cannot_be_read_loses_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let taker = Taker::default();
    taker.0.lock().unwrap().down = true;
    let mut queue = open(folder.path(), &taker);
    write(&mut queue, 1..=20);
    fs::rename(path(QUEUE), path("aside")).unwrap();
    fs::create_dir(path(QUEUE)).unwrap();
    taker.0.lock().unwrap().down = false;
    assert!(read(&path(QUEUE), (0, 100), 10).is_err());
    let told = queue.end(RunEnd::Failed).unwrap();
    assert!(told.contains(" bytes of metrics and events were not sent") && told.contains("cannot be read: "), "{told}");
    drop(queue);
    fs::remove_dir(path(QUEUE)).unwrap();
    // One that is gone has nothing to send.
    assert_eq!(read(&path(QUEUE), (0, 100), 10).unwrap().1, 100);
    fs::rename(path("aside"), path(QUEUE)).unwrap();
    assert_eq!(open(folder.path(), &taker).end(RunEnd::Finished), None);
    assert_eq!(taker.0.lock().unwrap().steps, (1..=20).collect::<Vec<_>>());
}

/// Answers when it is told to, and says when it is asked and when it is gone.
struct Slow {
    asked: mpsc::Sender<()>,
    answers: mpsc::Receiver<()>,
    gone: mpsc::Sender<()>,
    state: &'static str,
}

impl Transport for Slow {
    fn name(&self) -> String {
        "the slow one".into()
    }

    fn send(&mut self, _: &[Record]) -> Result<(), SendError> {
        self.asked.send(()).unwrap();
        self.answers.recv().unwrap();
        self.state = "made";
        Err(SendError::Later("it took too long".into()))
    }

    fn state(&self) -> Value {
        json!(self.state)
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.gone.send(()).unwrap();
    }
}

#[test]
fn the_state_is_written_before_the_first_send_and_not_by_a_queue_that_is_gone() {
    let folder = tempfile::tempdir().unwrap();
    let ((asked, is_asked), (answer, answers), (gone, is_gone)) = (mpsc::channel(), mpsc::channel(), mpsc::channel());
    let queue = SendQueue::open(folder.path(), json!({}), |_| Ok(Slow { asked, answers, gone, state: "new" }));
    is_asked.recv().unwrap();
    let stored = || serde_json::from_slice::<Value>(&fs::read(folder.path().join(STATE)).unwrap()).unwrap();
    assert_eq!(stored(), json!({ "sent": 0, "state": "new" }));
    drop(queue);
    answer.send(()).unwrap();
    // The thread has ended.
    is_gone.recv().unwrap();
    assert_eq!(stored(), json!({ "sent": 0, "state": "new" }));
}

#[test]
fn what_is_sent_is_cut_off_and_a_queue_that_was_cut_begins_anew() {
    let folder = tempfile::tempdir().unwrap();
    let taker = Taker::default();
    let mut queue = open(folder.path(), &taker);
    let long = "x".repeat(2000);
    (1..=1000).for_each(|step| queue.write(&format!("{{\"step\":{step},\"text\":\"{long}\"}}")).unwrap());
    assert_eq!(queue.end(RunEnd::Finished), None);
    assert_eq!(taker.0.lock().unwrap().steps, (1..=1000).collect::<Vec<_>>());
    assert!(fs::metadata(folder.path().join(QUEUE)).unwrap().len() < 2 * SENT_BYTES);
    // A kill between the cut and the note of it.
    fs::write(folder.path().join(QUEUE), "").unwrap();
    fs::write(folder.path().join(STATE), "{\"sent\":2000000,\"state\":null}").unwrap();
    let mut queue = open(folder.path(), &taker);
    write(&mut queue, 1001..=1002);
    assert_eq!(queue.end(RunEnd::Finished), None);
    assert_eq!(taker.0.lock().unwrap().steps.len(), 1002);
}
