//! The commands of `docs/planning.md` run, and say what the page says.

mod common;

use common::Place;

fn page() -> String {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/planning.md");
    std::fs::read_to_string(path).unwrap()
}

/// What stands between fences, with the line before each.
fn blocks(page: &str) -> Vec<(&str, &str)> {
    let mut parts = page.split("```");
    let mut all = Vec::new();
    while let (Some(before), Some(block)) = (parts.next(), parts.next()) {
        all.push((before.trim_end().lines().last().unwrap_or(""), block));
    }
    all
}

#[test]
fn the_commands_of_the_page_run_and_say_what_it_says() {
    let place = Place::new();
    let page = page();
    let mut commands = Vec::new();
    for (before, block) in blocks(&page) {
        if let Some(config) = block.strip_prefix("toml\n") {
            std::fs::write(place.path(before.trim_matches('`')), config).unwrap();
        }
        commands.extend(block.lines().filter_map(|line| line.strip_prefix("lockstep ")));
    }
    assert!(commands.len() > 10, "{commands:?}");
    let fast = |line: &&str| {
        !line.contains("--measure")
            && (line.starts_with("explain")
                || line.contains("--recipe")
                || line.contains("--budget")
                || line.contains("--scaling"))
    };
    for line in commands.into_iter().filter(fast) {
        let args: Vec<String> = line
            .split('"')
            .enumerate()
            .flat_map(|(i, part)| match i % 2 {
                0 => part.split_whitespace().map(str::to_owned).collect(),
                _ => vec![part.to_owned()],
            })
            .collect();
        let text = place.ok(&args.iter().map(String::as_str).collect::<Vec<_>>());
        let said = |part: &str| assert!(text.contains(part), "{line}: {part}\n{text}");
        if line.contains("--mfu 0.4 --gpus 480") {
            said("71,601 GPU-days");
            said("149.2 days on 480");
        }
        if line.contains("h100 --gpus 128") {
            said("1,024 = 2 · 128 · 4");
        }
        if line.contains("--recipe --gpu a100 --gpus 4") {
            said("256 = 8 · 4 · 8");
        }
        if line.contains("--set train.micro_batch=64") {
            said("the 3 cheapest changes that make it fit (time predicted on A100 80GB");
        }
        if let Some(cluster) = line.split("--cluster ").nth(1).filter(|_| line.contains("--recipe")) {
            // The row of the table has the GPU-days that the command says.
            let days = text
                .lines()
                .find_map(|line| line.split_once(" days, "))
                .map(|(_, days)| days.trim_end_matches(" GPU-days"));
            let days = days.unwrap_or_else(|| panic!("{text}"));
            assert!(page.contains(&format!("| {days} |")), "{cluster}: {days} GPU-days are not in the page");
        }
    }
}
