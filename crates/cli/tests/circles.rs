//! Files of a crate that need each other in a circle can only be read together: no circle is larger than five.
//!
//! A file needs another one if it names an item of it. Declarations of modules, re-exports and tests do not count; a name that comes
//! by a re-export is one of the file that defines it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A module's path in its crate; that of the root is empty.
type Module = Vec<String>;

#[derive(Default)]
struct File {
    /// Modules that it declares, and those for tests.
    children: BTreeSet<String>,
    tests: BTreeSet<String>,
    /// Items that it defines.
    items: BTreeSet<String>,
    imports: Vec<Import>,
    /// Paths and names that stand in its code.
    paths: Vec<Vec<String>>,
    names: BTreeSet<String>,
}

struct Import {
    public: bool,
    path: Vec<String>,
    name: String,
}

/// Names, `::` and single characters, without comments and literals.
fn tokens(text: &str) -> Vec<&str> {
    let (mut all, mut at) = (Vec::new(), 0);
    let word = |c: char| c.is_alphanumeric() || c == '_';
    while let Some(c) = text[at..].chars().next() {
        let rest = &text[at..];
        let len = match c {
            _ if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            'r' if rest.starts_with("r#\"") => 3 + rest[3..].find("\"#").unwrap() + 2,
            '"' => {
                let mut escaped = false;
                let ends = |c: char| {
                    let end = c == '"' && !escaped;
                    escaped = c == '\\' && !escaped;
                    end
                };
                rest[1..].find(ends).unwrap() + 2
            }
            // A character; else it is a lifetime.
            '\'' if rest[1..].starts_with('\\') => 4 + rest[3..].find('\'').unwrap(),
            '\'' if rest[1..].chars().nth(1) == Some('\'') => 2 + rest[1..].chars().next().unwrap().len_utf8(),
            _ if word(c) => rest.find(|c| !word(c)).unwrap_or(rest.len()),
            _ if rest.starts_with("::") => 2,
            _ => c.len_utf8(),
        };
        let token = &rest[..len];
        if !c.is_whitespace() && !"\"'".contains(c) && !token.starts_with("//") && !token.starts_with("r#\"") {
            all.push(token);
        }
        at += len;
    }
    all
}

/// The end of the item or statement that begins at `at`: after its semicolon or its braces.
fn end_of(tokens: &[&str], at: usize) -> usize {
    let (mut depth, is_use) = (0, tokens[at..].iter().take(5).any(|token| *token == "use"));
    for (i, token) in tokens.iter().enumerate().skip(at) {
        match *token {
            "{" | "(" | "[" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            _ => {}
        }
        if depth == 0 && (*token == ";" || (*token == "}" && !is_use)) {
            return i + 1;
        }
    }
    tokens.len()
}

/// The paths of a tree of imports, which ends at a semicolon, a comma or a brace.
fn tree(tokens: &[&str], at: &mut usize, before: &[String], public: bool, to: &mut Vec<Import>) {
    let mut path = before.to_vec();
    loop {
        match tokens[*at] {
            "{" => {
                while tokens[*at] != "}" {
                    *at += 1;
                    if tokens[*at] != "}" {
                        tree(tokens, at, &path, public, to);
                    }
                }
                *at += 1;
                return;
            }
            "::" => {}
            "self" if !path.is_empty() => {}
            "as" => {
                *at += 2;
                return to.push(Import { public, path, name: tokens[*at - 1].to_owned() });
            }
            ";" | "," | "}" => {
                let name = path.last().unwrap().clone();
                return to.push(Import { public, path, name });
            }
            part => path.push(part.to_owned()),
        }
        *at += 1;
    }
}

/// Whether an attribute says that what follows is there for tests alone.
fn is_for_tests(tokens: &[&str]) -> bool {
    tokens.starts_with(&["[", "cfg", "(", "test"]) || tokens.starts_with(&["[", "cfg", "(", "all", "(", "test"])
}

fn parse(text: &str) -> File {
    let (tokens, mut file) = (tokens(text), File::default());
    let (mut at, mut depth) = (0, 0);
    let is_name = |token: &str| token.starts_with(|c: char| c.is_alphabetic() || c == '_');
    while at < tokens.len() {
        let next = tokens.get(at + 1).copied().unwrap_or("");
        match tokens[at] {
            "#" if is_for_tests(&tokens[at + 1..]) => {
                let begin = at + 1 + tokens[at + 1..].iter().position(|token| *token == "]").unwrap() + 1;
                let end = end_of(&tokens, begin);
                if let Some([_, name, ";"]) = tokens[begin..end].windows(3).find(|w| w[0] == "mod") {
                    file.tests.insert((*name).to_owned());
                }
                at = end;
                continue;
            }
            "mod" if tokens.get(at + 2) == Some(&";") => {
                file.children.insert(next.to_owned());
                at += 3;
                continue;
            }
            "use" if is_name(next) => {
                let public = at > 0 && (tokens[at - 1] == "pub" || tokens[at - 1] == ")");
                at += 1;
                tree(&tokens, &mut at, &[], public, &mut file.imports);
            }
            "fn" | "struct" | "enum" | "union" | "trait" | "type" | "const" | "static" | "mod" if depth == 0 => {
                file.items.insert(next.to_owned());
            }
            "macro_rules" => {
                file.items.insert(tokens[at + 2].to_owned());
            }
            "{" => depth += 1,
            "}" => depth -= 1,
            name if is_name(name) && (at == 0 || tokens[at - 1] != "::") => {
                let mut path = vec![name.to_owned()];
                while tokens.get(at + 1) == Some(&"::") && tokens.get(at + 2).is_some_and(|part| is_name(part)) {
                    path.push(tokens[at + 2].to_owned());
                    at += 2;
                }
                file.names.insert(name.to_owned());
                file.paths.push(path);
            }
            _ => {}
        }
        at += 1;
    }
    file
}

type Files = BTreeMap<Module, File>;

/// Reads a module and those below it.
fn read(path: &Path, module: Module, files: &mut Files) {
    let text = std::fs::read_to_string(path).unwrap();
    let file = parse(&text);
    let root = ["lib", "main", "mod"].iter().any(|name| path.file_stem().unwrap() == *name);
    let below = if root { path.parent().unwrap().to_path_buf() } else { path.with_extension("") };
    for name in &file.children {
        let places = [below.join(format!("{name}.rs")), below.join(name).join("mod.rs")];
        let path = places.iter().find(|path| path.is_file()).unwrap_or_else(|| panic!("{places:?}"));
        read(path, [&module[..], std::slice::from_ref(name)].concat(), files);
    }
    files.insert(module, file);
}

/// The module of the item that a path means, which stands in a module: none where that is a module, of another crate, or of a test.
fn resolve(files: &Files, module: &Module, path: &[String], depth: usize) -> Option<Module> {
    let (mut here, mut rest) = (module.clone(), path);
    match path[0].as_str() {
        "crate" => (here, rest) = (Vec::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|part| part == "super") {
                here.pop();
                rest = &rest[1..];
            }
        }
        name => {
            let file = &files[module];
            let known = file.children.contains(name) || file.imports.iter().any(|i| i.name == name && i.path != path);
            if !known {
                return None;
            }
        }
    }
    while let Some(name) = rest.first() {
        let file = &files[&here];
        if file.children.contains(name) {
            here.push(name.clone());
            rest = &rest[1..];
            continue;
        }
        if file.tests.contains(name) || depth > 8 {
            return None;
        }
        if file.items.contains(name) {
            break;
        }
        if let Some(import) = file.imports.iter().find(|import| import.name == *name) {
            let path = [&import.path, &rest[1..]].concat();
            return resolve(files, &here, &path, depth + 1);
        }
        break;
    }
    (!rest.is_empty()).then_some(here)
}

/// The files that each file needs.
fn needs(files: &Files) -> BTreeMap<&Module, BTreeSet<Module>> {
    let of = |(module, file)| {
        let (module, file): (&Module, &File) = (module, file);
        let used = |import: &&Import| !import.public || file.names.contains(&import.name);
        let imports = file.imports.iter().filter(used).map(|import| &import.path);
        let paths = imports.chain(file.paths.iter().filter(|path| path.len() > 1));
        let items = paths.filter_map(|path| resolve(files, module, path, 0)).filter(|at| at != module);
        (module, items.collect())
    };
    files.iter().map(of).collect()
}

/// Files that need each other, each such set once.
fn circles(files: &Files) -> Vec<Vec<String>> {
    let needs = needs(files);
    let reach = |from: &Module| {
        let (mut found, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(at) = open.pop() {
            open.extend(needs[&at].iter().filter(|to| found.insert((*to).clone())).cloned());
        }
        found
    };
    let reached: BTreeMap<&Module, BTreeSet<Module>> = files.keys().map(|at| (at, reach(at))).collect();
    let both = |a: &Module, b: &Module| reached[a].contains(b) && reached[b].contains(a);
    let circle = |at: &Module| files.keys().filter(|to| both(at, to)).map(|to| to.join("::")).collect::<Vec<_>>();
    files.keys().map(circle).collect::<BTreeSet<_>>().into_iter().collect()
}

#[test]
fn no_circle_of_files_is_larger_than_five() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for entry in std::fs::read_dir(crates).unwrap() {
        let entry = entry.unwrap();
        let roots = ["src/lib.rs", "src/main.rs"].map(|name| entry.path().join(name));
        let mut files = Files::new();
        read(roots.iter().find(|path| path.is_file()).unwrap(), Vec::new(), &mut files);
        let largest = circles(&files).into_iter().max_by_key(Vec::len).unwrap();
        let most = match entry.file_name().to_str().unwrap() {
            // The op table: a row names ops, and the list of ops names the rows.
            "ir" => 31,
            _ => 5,
        };
        assert!(largest.len() <= most, "{:?}: {} files: {largest:?}", entry.file_name(), largest.len());
    }
}
