//! Hosts of this machine with a network between them: network namespaces, each with a cable to a switch, which is one more.
// Each test binary uses a part of this.
#![allow(dead_code)]

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a test says that may not make hosts.
pub const SKIPPED: &str = "skipped: hosts as network namespaces take root, iproute2 and unshare";

/// Hosts with names and addresses of their own, and one file system, for as long as this lives.
pub struct Hosts {
    name: String,
    count: usize,
}

impl Hosts {
    /// None where this process may not make them.
    pub fn new(count: usize) -> Option<Self> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("ls{}-{}-", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let hosts = Self { name, count };
        let switch = hosts.namespace("switch");
        let bridge = |name: &str| {
            ip(&["-n", &switch, "link", "add", name, "type", "bridge"])
                && ip(&["-n", &switch, "link", "set", name, "up"])
        };
        let made = quietly("unshare", &["--uts", "true"])
            && ip(&["netns", "add", &switch])
            && [ONE, OTHER].into_iter().all(bridge)
            && (0..count).all(|host| hosts.connect(host, &switch));
        made.then_some(hosts)
    }

    fn connect(&self, host: usize, switch: &str) -> bool {
        let (there, port) = (self.namespace(&host.to_string()), port(host));
        let cable = ["-n", &there, "link", "add", "link0", "type", "veth", "peer", "name", &port, "netns", switch];
        let address = format!("{}/24", Self::address(host));
        ip(&["netns", "add", &there])
            && ip(&cable)
            && ip(&["-n", &there, "addr", "add", &address, "dev", "link0"])
            && ["lo", "link0"].iter().all(|link| ip(&["-n", &there, "link", "set", link, "up"]))
            && ip(&["-n", switch, "link", "set", &port, "master", ONE, "up"])
    }

    fn namespace(&self, of: &str) -> String {
        format!("{}{of}", self.name)
    }

    /// The address of a host.
    pub fn address(host: usize) -> String {
        format!("10.213.77.{}", host + 1)
    }

    /// A command on one of them.
    pub fn on(&self, host: usize, command: &Command) -> Command {
        let mut there = Command::new("ip");
        // The name of the host is this process's alone.
        there.args(["netns", "exec", &self.namespace(&host.to_string()), "unshare", "--uts", "sh", "-c"]);
        there.args(["hostname \"$0\"; exec \"$@\"", &format!("host{host}")]);
        there.arg(command.get_program()).args(command.get_args()).stdin(Stdio::null());
        there.current_dir(command.get_current_dir().unwrap());
        command.get_envs().filter_map(|(name, value)| Some((name, value?))).for_each(|(name, value)| {
            there.env(name, value);
        });
        there
    }

    /// Pulls the cable of a host.
    pub fn unplug(&self, host: usize) {
        self.switch(&["link", "set", &port(host), "down"]);
    }

    /// And puts it back.
    pub fn plug(&self, host: usize) {
        self.switch(&["link", "set", &port(host), "up"]);
    }

    /// From now on nothing goes between these hosts and the others, and nobody is told.
    pub fn part(&self, hosts: &[usize]) {
        hosts.iter().for_each(|host| self.switch(&["link", "set", &port(*host), "master", OTHER]));
    }

    fn switch(&self, args: &[&str]) {
        assert!(ip(&[&["-n", &self.namespace("switch")], args].concat()), "{args:?}");
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        // Some may not have been made.
        let hosts = (0..self.count).map(|host| host.to_string());
        for name in hosts.chain(["switch".to_owned()]) {
            ip(&["netns", "del", &self.namespace(&name)]);
        }
    }
}

/// The switch's two halves: all are at the first until they are parted.
const ONE: &str = "one";
const OTHER: &str = "other";

/// The port of the switch that a host's cable is in.
fn port(host: usize) -> String {
    format!("port{host}")
}

fn ip(args: &[&str]) -> bool {
    quietly("ip", args)
}

fn quietly(program: &str, args: &[&str]) -> bool {
    let quiet = Command::new(program).args(args).stdout(Stdio::null()).stderr(Stdio::null()).status();
    quiet.is_ok_and(|status| status.success())
}
