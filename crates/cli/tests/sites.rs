//! `launch --slurm --cluster NAME`: what jobs of known sites ask for.

mod common;

use common::{CONFIG, Place};
use std::process::Command;

/// A config of four ranks, with these lines below `[cluster]`.
fn place(cluster: &str) -> Place {
    let place = Place::new();
    let tables = format!("[parallel]\ndp = 4\n\n[cluster]\ntime = \"1:00:00\"\n{cluster}\n\n[checkpoint]");
    place.config(&CONFIG.replace("[checkpoint]", &tables));
    place
}

/// The script of a job, and what stderr says.
fn script(place: &Place, more: &[&str]) -> (String, String) {
    let args = [&["launch", "run.toml", "--slurm", "--dry-run"], more].concat();
    let output = place.command(&args).env("LOCKSTEP_SITES", place.path("sites")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let script = String::from_utf8(output.stdout).unwrap();
    assert!(Command::new("bash").args(["-n", "-c", &script]).status().unwrap().success(), "{script}");
    (script, said)
}

#[test]
fn a_job_asks_for_what_its_site_has() {
    let place = place("");
    let (job, said) = script(&place, &["--cluster", "leonardo"]);
    for ask in
        ["--partition=boost_usr_prod", "--gpus-per-node=4", "--cpus-per-task=8", "--ntasks-per-node=4", "--nodes=1"]
    {
        assert!(job.contains(&format!("#SBATCH {ask}\n")), "{ask}: {job}");
    }
    assert!(said.contains("warning: nobody has run a job on Leonardo Booster (CINECA)"), "{said}");
    assert!(said.contains("docs.hpc.cineca.it") && said.contains("give --account NAME"), "{said}");
    let (job, said) = script(&place, &["--cluster", "jean-zay", "--account", "abc@a100"]);
    assert!(job.contains("#SBATCH --account=abc@a100\n") && job.contains("#SBATCH --constraint=a100\n"), "{job}");
    assert!(!said.contains("give --account"), "{said}");
    // A site that the catalogue of hardware does not have, and one whose GPUs are of no use.
    assert!(script(&place, &["--cluster", "Isambard-AI"]).0.contains("#SBATCH --partition=workq\n"));
    let (job, said) = script(&place, &["--cluster", "lumi"]);
    assert!(!job.contains("gpus") && said.contains("AMD GPUs"), "{job}{said}");
    // A cluster of the catalogue alone.
    assert!(script(&place, &["--cluster", "selene"]).0.contains("#SBATCH --gpus-per-node=8\n"));
}

#[test]
fn the_config_and_options_win_over_the_site() {
    let place = place("partition = \"mine\"\ncpus_per_rank = 3");
    let (job, _) = script(&place, &["--cluster", "leonardo"]);
    assert!(job.contains("--partition=mine\n") && job.contains("--cpus-per-task=3\n"), "{job}");
    assert!(job.contains("--gpus-per-node=4\n"), "{job}");
    let (job, _) =
        script(&place, &["--cluster", "leonardo", "--partition", "other", "--set", "cluster.cpus_per_rank=5"]);
    assert!(job.contains("--partition=other\n") && job.contains("--cpus-per-task=5\n"), "{job}");
}

#[test]
fn users_add_sites_and_replace_them() {
    let place = place("");
    std::fs::create_dir(place.path("sites")).unwrap();
    let own = "[[site]]\nname = \"ours\"\nlabel = \"Our cluster\"\npartition = \"gpu\"\ngpus_per_node = 2\nmodules = [\"cuda/13\"]\n\
               source = \"our wiki\"\ntried = true\n\n[[site]]\nname = \"leonardo\"\nlabel = \"L\"\npartition = \"new\"\nsource = \"x\"\n";
    std::fs::write(place.path("sites/ours.toml"), own).unwrap();
    let (job, said) = script(&place, &["--cluster", "ours"]);
    assert!(job.contains("#SBATCH --nodes=2\n") && job.contains("\nmodule load cuda/13\n"), "{job}");
    assert!(!said.contains("nobody has run"), "{said}");
    assert!(script(&place, &["--cluster", "leonardo"]).0.contains("--partition=new\n"));
    std::fs::write(place.path("sites/wrong.toml"), "[[site]]\nname = \"x\"\npartitoin = \"y\"\n").unwrap();
    let args = ["launch", "run.toml", "--slurm", "--dry-run", "--cluster", "ours"];
    let output = place.command(&args).env("LOCKSTEP_SITES", place.path("sites")).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(2) && said.contains("partitoin") && said.contains("\nhint: a [[site]] has"),
        "{said}"
    );
}

#[test]
fn an_unknown_site_is_refused_with_the_known_ones() {
    let place = place("");
    let error = place.fails(2, &["launch", "run.toml", "--slurm", "--dry-run", "--cluster", "isambart-ai"]);
    assert!(error.contains("isambard-ai") && error.contains("leonardo") && error.contains("selene"), "{error}");
}

/// Both recipes of a container build with the Rust that the workspace asks for, and install what docs/install.md says.
#[test]
fn containers_have_what_the_documents_say() {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../");
    let read = |name: &str| std::fs::read_to_string(format!("{root}{name}")).unwrap();
    let after = |text: &str, what: &str| text.split_once(what).unwrap().1.lines().next().unwrap().trim().to_owned();
    let rust = after(&read("Cargo.toml"), "rust-version = ").replace('"', "");
    let packages = after(&read("docs/install.md"), "\npip install nvidia-cuda-nvrtc");
    for recipe in ["containers/Dockerfile", "containers/lockstep.def"] {
        let text = read(recipe);
        assert!(text.contains(&format!("rust:{rust}-")), "{recipe}: Rust {rust}");
        assert_eq!(after(&text, " nvidia-cuda-nvrtc"), packages, "{recipe}");
    }
}
