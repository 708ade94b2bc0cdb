//! A file that all processes of a job can read and nobody else: where rank 0 says how it is found.
//!
//! It has the secret of the job, where whoever started the processes gave them none, and the port, where another program had the one that
//! they were given. One that an earlier job has left is of another job, or leads to nobody who knows its secret.

use super::secret::JobSecret;
use super::wire::plain;
use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::PathBuf;

/// The file, and which job it is looked at for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Board {
    /// Where it is, in a folder that all processes share.
    pub path: PathBuf,
    /// What tells the job from others that use the same file.
    pub job: String,
}

/// What stands there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Posted {
    /// Rank 0 listens at this address, and the secret is this one, or the one that all were given.
    At { address: String, secret: Option<JobSecret> },
    /// Rank 0 has ended before it listened; why.
    Failed(String),
}

/// The first line.
const TITLE: &str = "lockstep rendezvous";
/// More than any has.
const MOST: u64 = 16 << 10;

impl Board {
    /// Writes it, in one piece and for this user alone.
    pub fn post(&self, posted: &Posted) -> io::Result<()> {
        let (what, secret) = match posted {
            Posted::At { address, secret } => (format!("at {}", line(address)), secret.as_ref()),
            Posted::Failed(why) => (format!("failed {}", line(why)), None),
        };
        let secret = secret.map_or_else(|| "given".to_owned(), JobSecret::to_hex);
        let text = format!("{TITLE}\n{}\n{what}\n{secret}\n", line(&self.job));
        if let Some(folder) = self.path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder)?;
        }
        let mut name = self.path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}", std::process::id()));
        let new = self.path.with_file_name(name);
        // One that is left of a process of this number.
        let _ = fs::remove_file(&new);
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            file.write_all(text.as_bytes())?;
            drop(file);
            fs::rename(&new, &self.path)
        };
        write().inspect_err(|_| drop(fs::remove_file(&new)))
    }

    /// What stands there for this job, if anything does; or why it cannot be used.
    pub fn read(&self) -> Result<Option<Posted>, String> {
        let shown = self.path.display();
        let file = match fs::File::open(&self.path) {
            Ok(file) => file,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(format!("cannot open {shown}: {e}")),
        };
        let about = file.metadata().map_err(|e| format!("cannot read {shown}: {e}"))?;
        if !about.is_file() || about.mode() & 0o077 != 0 {
            return Err(format!("{shown} is not a file that only its owner may read"));
        }
        let mut text = String::new();
        file.take(MOST).read_to_string(&mut text).map_err(|e| format!("cannot read {shown}: {e}"))?;
        Ok(self.parse(&text))
    }

    fn parse(&self, text: &str) -> Option<Posted> {
        let mut lines = text.lines();
        let (title, job, what, secret) = (lines.next()?, lines.next()?, lines.next()?, lines.next()?);
        if title != TITLE || job != line(&self.job) {
            return None;
        }
        match what.split_once(' ')? {
            ("at", address) => {
                let secret = if secret == "given" { None } else { Some(JobSecret::from_hex(secret)?) };
                Some(Posted::At { address: address.to_owned(), secret })
            }
            ("failed", why) => Some(Posted::Failed(why.to_owned())),
            _ => None,
        }
    }
}

/// A text as one line.
fn line(text: &str) -> String {
    plain(text).replace('\n', "\\n")
}

/// A post that goes when this does, unless another has taken its place.
pub struct Notice {
    pub board: Board,
    pub posted: Posted,
}

impl Drop for Notice {
    fn drop(&mut self) {
        if self.board.read() == Ok(Some(self.posted.clone())) {
            // Where it stays, it leads to nobody.
            let _ = fs::remove_file(&self.board.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn what_is_posted_is_read_by_the_same_job_of_the_same_user() {
        let folder = std::env::temp_dir().join(format!("lockstep-board-{}", std::process::id()));
        let board = Board { path: folder.join("run/.rendezvous"), job: "job 7\nof \x1b[31mslurm".into() };
        assert_eq!(board.read(), Ok(None));
        let secret = JobSecret::random().unwrap();
        let posted = Posted::At { address: "n1:4321".into(), secret: Some(secret) };
        board.post(&Posted::Failed("no config\nhint: none".into())).unwrap();
        assert_eq!(board.read(), Ok(Some(Posted::Failed("no config\\nhint: none".into()))));
        board.post(&posted).unwrap();
        assert_eq!(board.read(), Ok(Some(posted.clone())));
        assert_eq!(fs::metadata(&board.path).unwrap().mode() & 0o777, 0o600);
        let other = Board { job: "job 8".into(), ..board.clone() };
        assert_eq!(other.read(), Ok(None));
        // One that others may read is no secret.
        fs::set_permissions(&board.path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(board.read().unwrap_err().contains("only its owner"));
        let given = Posted::At { address: "n1:9".into(), secret: None };
        let notice = Notice { board: board.clone(), posted: given.clone() };
        board.post(&posted).unwrap();
        drop(notice);
        assert_eq!(board.read(), Ok(Some(posted.clone())), "that of another was removed");
        drop(Notice { board: board.clone(), posted });
        assert_eq!(board.read(), Ok(None));
        assert_eq!(fs::read_dir(folder.join("run")).unwrap().count(), 0);
        fs::remove_dir_all(folder).unwrap();
    }
}
