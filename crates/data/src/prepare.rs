//! From files of text to a folder of shards.

use std::fs::{self, File, TryLockError};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use xxhash_rust::xxh3::Xxh3;

use crate::holdout::HoldOut;
use crate::output::{DATA_JSON, FILES_JSONL, TOKENIZER_JSON, hexadecimal};
use crate::partial::{Part, Partial};
use crate::prepared::{Description, files_jsonl};
use crate::scan::{Form, Found, SourceFile, scan};
use crate::source::{Cursor, Fields, Input, Reading, Units};
use crate::stop::{NEVER, go_on};
use crate::workers::{Queue, Work, Workers};
use crate::{
    Chat, DataError, DataHint, DataSetting, PrepareSpec, Prepared, Result, ShardSummary, SplitSummary, Tokenizer,
};

/// How the work is carried out. What comes out does not depend on the threads.
#[derive(Clone, Debug)]
pub struct PrepareOptions<'a> {
    /// Threads that tokenise.
    pub threads: usize,
    /// The size at which a part is closed and kept: a new shard begins, and a restart need not go further back.
    pub part_bytes: u64,
    /// Set to end the work soon, with [`DataError::Interrupted`].
    pub stop: &'a AtomicBool,
    /// Whether to take what is there if it is what would be made: another process may have just made it.
    pub adopt: bool,
}

impl Default for PrepareOptions<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        PrepareOptions { threads, part_bytes: 256 << 20, stop: &NEVER, adopt: false }
    }
}

/// How far [`prepare`] has come. Empty files are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of input files read.
    pub bytes_done: u64,
    /// Bytes to read in all.
    pub bytes_total: u64,
    /// Files read.
    pub files_done: u64,
    /// Files to read in all.
    pub files_total: u64,
    /// Whether another process prepares the folder, and this one waits for it.
    pub waiting: bool,
}

/// Prepares with all cores; see [`prepare_with`].
pub fn prepare(spec: &PrepareSpec, out: &Path, progress: &mut dyn FnMut(Progress)) -> Result<Prepared> {
    prepare_with(spec, out, &PrepareOptions::default(), progress)
}

/// Makes tokens of the text of `spec` and writes shards, `data.json`, `files.jsonl` and the tokenizer into `out`.
///
/// A document is a file of text, a line of a JSON-lines file or a row of a Parquet file; its tokens end with an
/// EOS token, and begin with a BOS token where the spec names one. What is held out are whole records, whole files of text, or 64 KiB pieces of longer ones: neighbouring
/// pieces of one split stay together, and where the split changes the part before it ends with an EOS token as if it
/// were a document. If the data set is a single piece of text, its end is held out. With a validation fraction of 0 there
/// is no validation shard.
///
/// Finished parts are kept in a hidden folder in `out`, and the same call takes them over if it is repeated after an
/// interruption, unless a file has changed since. `options.stop` interrupts within the time of tokenising some 100 KB. The data set takes its place whole, `data.json` last; so a folder
/// that has one is complete, and an earlier one stays as it was if reading or writing fails. Memory does not grow with
/// the size of the files. `progress` is called at least once per MiB of text, and ten times a second while another process
/// that prepares the same folder is waited for.
pub fn prepare_with(
    spec: &PrepareSpec,
    out: &Path,
    options: &PrepareOptions<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared> {
    let found = scan(spec, out, options.stop)?;
    require_records(spec, &found)?;
    // Before it is read: a file that changes meanwhile is then told from what was read.
    let content = found.content(options.stop)?;
    let holdout = HoldOut::choose(spec.validation_fraction, spec.seed, &found.files)?;
    let tokenizer = Tokenizer::open(&spec.tokenizer)?;
    let chat = spec.chat.as_ref().map(|chat| Chat::open(chat, &tokenizer)).transpose()?;
    fs::create_dir_all(out).map_err(|cause| DataError::unwritable(out, cause))?;
    let _lock = lock(out, options.stop, &mut || progress(Progress { waiting: true, ..Progress::default() }))?;
    if options.adopt
        && let Some(made) = Prepared::open(out)?
        && is_current(spec, &made, options.stop)?
    {
        return Ok(made);
    }

    let mut partial = Partial::open(out, key(spec, &found, options)?)?;
    if !partial.installing() {
        let task = Task {
            spec,
            found: &found,
            content,
            holdout: &holdout,
            tokenizer: &tokenizer,
            chat: chat.as_ref(),
            options,
        };
        task.write_parts(&mut partial, progress)?;
        task.describe(&partial)?;
    }
    partial.install(tokenizer.source().is_some())?;
    Prepared::load(out)
}

/// Refuses text without fields where the spec names one for prompts or conversations.
fn require_records(spec: &PrepareSpec, found: &Found) -> Result<()> {
    let what = match (&spec.prompt_field, &spec.chat) {
        (Some(field), _) => format!("prompts are in the field {field:?}"),
        (None, Some(_)) => format!("conversations are in the field {:?}", spec.text_field),
        (None, None) => return Ok(()),
    };
    match found.files.iter().find(|file| file.form == Form::Text) {
        None => Ok(()),
        Some(file) => Err(DataError::source(
            &file.path,
            format!("{what}, and this is plain text without fields"),
            DataHint::of(
                "use JSON lines (.jsonl, .jsonl.zst) or Parquet, and choose them with {} where a folder has others",
                DataSetting::Extensions,
            ),
        )),
    }
}

/// Whether `prepared` is what preparing `spec` now would give, by the lengths and samples of the content of the files.
pub fn is_current(spec: &PrepareSpec, prepared: &Prepared, stop: &AtomicBool) -> Result<bool> {
    Ok(spec.reads_alike(prepared.spec()) && is_same_text(spec, prepared, stop)?)
}

/// Whether the text that `spec` names now is what was prepared, by the same marks.
pub fn is_same_text(spec: &PrepareSpec, prepared: &Prepared, stop: &AtomicBool) -> Result<bool> {
    prepared.is_of(&scan(spec, prepared.folder(), stop)?, stop)
}

/// The text that a spec names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Survey {
    /// Files with text.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Looks for the text of `spec`, to be prepared in `out`, and reads none of it.
pub fn survey(spec: &PrepareSpec, out: &Path, stop: &AtomicBool) -> Result<Survey> {
    let found = scan(spec, out, stop)?;
    Ok(Survey { files: found.files.len() as u64, bytes: found.files.iter().map(|file| file.bytes).sum() })
}

/// A part of the text of a spec, for a small run.
#[derive(Clone, Debug)]
pub struct Excerpt {
    /// All of the text.
    pub survey: Survey,
    /// The files to read instead.
    pub paths: Vec<PathBuf>,
    /// Whether they are all.
    pub all: bool,
}

/// The first files of a spec, up to about this many bytes of them and one at least; samples of every file were read, so each can be.
/// Of one file that is longer, its beginning is copied into the folder `to`, where it is text or lines; others are taken whole.
pub fn excerpt(spec: &PrepareSpec, out: &Path, to: &Path, most: u64, stop: &AtomicBool) -> Result<Excerpt> {
    let found = scan(spec, out, stop)?;
    require_records(spec, &found)?;
    found.content(stop)?;
    let survey = Survey { files: found.files.len() as u64, bytes: found.files.iter().map(|file| file.bytes).sum() };
    let mut taken = 0;
    let fits = |file: &&SourceFile| {
        taken += file.bytes;
        taken <= most
    };
    let paths: Vec<PathBuf> = found.files.iter().take_while(fits).map(|file| file.path.clone()).collect();
    let all = paths.len() == found.files.len();
    let first = &found.files[0];
    let paths = match (paths.is_empty(), first.form.is_plain()) {
        (false, _) => paths,
        (true, true) => vec![beginning(&first.path, to, most)?],
        (true, false) => vec![first.path.clone()],
    };
    Ok(Excerpt { survey, paths, all })
}

/// Copies the beginning of a file, up to the end of a line.
fn beginning(path: &Path, to: &Path, most: u64) -> Result<PathBuf> {
    let mut bytes = Vec::new();
    let file = Input::open(path).map_err(|cause| DataError::unreadable(path, cause))?;
    file.take(most).read_to_end(&mut bytes).map_err(|cause| DataError::unreadable(path, cause))?;
    if let Some(end) = memchr::memrchr(b'\n', &bytes) {
        bytes.truncate(end + 1);
    }
    let copy = to.join(path.file_name().unwrap_or("text".as_ref()));
    let written = fs::create_dir_all(to).and_then(|()| fs::write(&copy, &bytes));
    written.map_err(|cause| DataError::unwritable(&copy, cause))?;
    Ok(copy)
}

struct Task<'a> {
    spec: &'a PrepareSpec,
    found: &'a Found,
    content: u64,
    holdout: &'a HoldOut,
    tokenizer: &'a Tokenizer,
    chat: Option<&'a Chat>,
    options: &'a PrepareOptions<'a>,
}

impl Task<'_> {
    /// Makes the parts that are not there yet.
    fn write_parts(&self, partial: &mut Partial, progress: &mut dyn FnMut(Progress)) -> Result<()> {
        let total = Progress {
            bytes_total: self.found.files.iter().map(|file| file.bytes).sum(),
            files_total: self.found.files.len() as u64,
            ..Progress::default()
        };
        let at = |cursor: Cursor, bytes_done| Progress { bytes_done, files_done: cursor.file, ..total };
        let start = partial.parts.last().map_or(Cursor::default(), |part| part.after);
        progress(at(start, partial.parts.last().map_or(0, |part| part.input_bytes)));

        let (stop, tokenizer) = (self.options.stop, self.tokenizer);
        let chat = self.chat;
        let (text, prompt) = (&self.spec.text_field, self.spec.prompt_field.as_deref());
        let fields = Fields { text, prompt, chat: chat.is_some() };
        let work = Work { files: &self.found.files, fields, tokenizer, chat, stop };
        let reading = Reading { found: self.found, holdout: self.holdout, fields, tokenizer, stop };
        let begin =
            |partial: &Partial| partial.begin(self.tokenizer.width(), self.holdout.is_active(), self.spec.is_masked());
        let mut units = Units::from(start, reading);
        let queue = Queue::new(None);
        std::thread::scope(|scope| {
            let mut workers = Workers::start(scope, self.options.threads.max(1), &queue, work);
            let mut part = None;
            // An error of reading waits until what comes before it is tokenised: that may have an earlier one.
            let mut end: Option<Result<()>> = None;
            loop {
                while end.is_none() && workers.has_room() {
                    go_on(stop)?;
                    match units.next() {
                        Ok(Some(unit)) => workers.add(unit),
                        Ok(None) => end = Some(Ok(())),
                        Err(error) => end = Some(Err(error)),
                    }
                }
                if end.is_some() {
                    workers.flush();
                }
                let Some(results) = workers.take() else { break };
                for unit in results {
                    go_on(stop)?;
                    let unit = unit?;
                    let open = match &mut part {
                        Some(open) => open,
                        none => none.insert(begin(partial)?),
                    };
                    open.append(&unit)?;
                    progress(at(unit.after, unit.input_bytes));
                    if let Some(full) = part.take_if(|part| part.is_full(self.options.part_bytes)) {
                        partial.finish(full, unit.after)?;
                    }
                }
            }
            end.unwrap_or(Ok(()))?;
            // There is at least one part, though it be empty.
            if part.is_none() && partial.parts.is_empty() {
                part = Some(begin(partial)?);
            }
            part.map_or(Ok(()), |part| partial.finish(part, start))
        })?;
        progress(Progress { bytes_done: total.bytes_total, files_done: total.files_total, ..total });
        Ok(())
    }

    /// Writes what stands beside the shards, `data.json` last.
    fn describe(&self, partial: &Partial) -> Result<()> {
        partial.write(FILES_JSONL, &files_jsonl(self.found))?;
        if let Some(source) = self.tokenizer.source() {
            partial.write(TOKENIZER_JSON, source)?;
        }
        let sampled = |summary: ShardSummary| {
            let shard = partial.shard(&summary)?;
            Ok(ShardSummary { sampled: (!shard.is_verified()).then(|| hexadecimal(shard.sampled())), ..summary })
        };
        let summaries = |of: fn(&Part) -> Option<&ShardSummary>| {
            partial.parts.iter().filter_map(of).cloned().map(sampled).collect::<Result<Vec<_>>>()
        };
        let description = Description {
            format: Description::FORMAT,
            files: self.found.files.len() as u64,
            empty_files: self.found.empty_files,
            listing: self.found.listing(),
            content: Some(hexadecimal(self.content)),
            vocabulary: self.tokenizer.vocabulary(),
            eos: self.tokenizer.eos(),
            bos: self.tokenizer.bos(),
            train: SplitSummary::of(summaries(|part| Some(&part.train))?),
            validation: match self.holdout.is_active() {
                true => Some(SplitSummary::of(summaries(|part| part.validation.as_ref())?)),
                false => None,
            },
            spec: self.spec.clone(),
        };
        let mut text = serde_json::to_vec_pretty(&description)
            .map_err(|error| DataError::unwritable(Path::new(DATA_JSON), error.into()))?;
        text.push(b'\n');
        partial.write(DATA_JSON, &text)
    }
}

/// A number that differs where other parts would come out.
fn key(spec: &PrepareSpec, found: &Found, options: &PrepareOptions<'_>) -> Result<u64> {
    let spec = serde_json::to_vec(spec).map_err(|error| DataError::unwritable(Path::new(DATA_JSON), error.into()))?;
    let mut hasher = Xxh3::new();
    hasher.update(&Description::FORMAT.to_le_bytes());
    hasher.update(&options.part_bytes.to_le_bytes());
    hasher.update(&found.state().to_le_bytes());
    hasher.update(&spec);
    Ok(hasher.digest())
}

/// Keeps other processes out of a folder until it is dropped; waits for one that is there.
fn lock(folder: &Path, stop: &AtomicBool, waiting: &mut dyn FnMut()) -> Result<File> {
    let opened = File::open(folder).map_err(|cause| DataError::unreadable(folder, cause))?;
    loop {
        match opened.try_lock() {
            Ok(()) => return Ok(opened),
            Err(TryLockError::WouldBlock) => {
                go_on(stop)?;
                waiting();
                std::thread::sleep(LOOK_AGAIN);
            }
            Err(TryLockError::Error(cause)) => return Err(DataError::unwritable(folder, cause)),
        }
    }
}

const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::new_file::temporary_path;
    use crate::output::TRAIN_SHARD;
    use lockstep_ir::Hint;

    #[test]
    fn a_full_disk_is_reported_and_leaves_the_earlier_data_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("a.txt");
        let out = folder.path().join("out");
        let spec = PrepareSpec { paths: vec![text.clone()], ..PrepareSpec::default() };
        fs::write(&text, "earlier").unwrap();
        let earlier = prepare(&spec, &out, &mut |_| ()).unwrap().fingerprint();

        fs::write(&text, "later").unwrap();
        let partial = out.join(".partial");
        fs::create_dir(&partial).unwrap();
        std::os::unix::fs::symlink("/dev/full", temporary_path(&partial, TRAIN_SHARD)).unwrap();
        let error = prepare(&spec, &out, &mut |_| ()).unwrap_err();
        assert_eq!(
            error.with_hint(),
            format!(
                "{}: cannot be written: No space left on device (os error 28)\n\
                 hint: free some disk space, or choose a folder elsewhere",
                partial.join(TRAIN_SHARD).display()
            )
        );
        assert_eq!(fs::read_dir(&out).unwrap().count(), 3, "train.shard, files.jsonl and data.json");
        assert_eq!(Prepared::open(&out).unwrap().unwrap().fingerprint(), earlier);
    }
}
