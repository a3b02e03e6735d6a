//! Completion scripts for bash, zsh and fish, written from the description of the flags that argh has; cli.rs owns the
//! flags and prints the script.
use argh::{CommandInfoWithArgs, FlagInfo, FlagInfoKind};
use std::fmt::Write;

/// What the value of a flag, or a word behind a command, may be.
pub enum Values<'a> {
    Folder,
    File,
    Words(&'a [&'a str]),
    WordsOrFolder(&'a [&'a str]),
    Any,
}

/// The program, its commands, and what the value of a flag (`--model`) or a word behind a command (`completions`) may
/// be.
pub struct Program<'a> {
    pub info: &'a CommandInfoWithArgs,
    pub values: &'a dyn Fn(&str) -> Values<'a>,
}

impl Program<'_> {
    pub fn bash(&self) -> String {
        let name = self.info.name;
        let mut out = format!("# Completions of {name} for bash: source this file, or put it where bash-completion looks.\n_{name}() {{\n");
        out += "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]} words=\n  COMPREPLY=()\n";
        out += "  case $previous in\n";
        let mut flags: Vec<&FlagInfo> =
            self.info.commands.iter().flat_map(|c| c.command.flags).filter(|flag| takes_value(flag)).collect();
        flags.sort_by_key(|flag| flag.long);
        flags.dedup_by_key(|flag| flag.long);
        for flag in flags {
            let reply = match (self.values)(flag.long) {
                Values::Folder => "COMPREPLY=($(compgen -d -- \"$current\")); ".into(),
                Values::File => "COMPREPLY=($(compgen -f -- \"$current\")); ".into(),
                Values::Words(words) => format!("COMPREPLY=($(compgen -W '{}' -- \"$current\")); ", words.join(" ")),
                Values::WordsOrFolder(words) => {
                    format!("COMPREPLY=($(compgen -d -W '{}' -- \"$current\")); ", words.join(" "))
                }
                Values::Any => String::new(),
            };
            let _ = writeln!(out, "    {}) {reply}return ;;", spellings(flag).join("|"));
        }
        out += "  esac\n  case $command in\n";
        for c in &self.info.commands {
            let mut words: Vec<String> = c.command.flags.iter().flat_map(spellings).collect();
            if let Values::Words(more) = (self.values)(c.name) {
                words.extend(more.iter().map(|word| word.to_string()));
            }
            let _ = writeln!(out, "    {}) words='{}' ;;", c.name, words.join(" "));
        }
        let commands: Vec<&str> = self.info.commands.iter().map(|c| c.name).collect();
        let _ = write!(
            out,
            "  esac\n  [ \"$COMP_CWORD\" = 1 ] && words='{} --help --version'\n  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n}}\ncomplete -F _{name} {name}\n",
            commands.join(" ")
        );
        out
    }

    pub fn zsh(&self) -> String {
        let name = self.info.name;
        let mut out = format!("#compdef {name}\n# Completions of {name} for zsh: put this file as _{name} into a folder of $fpath.\n_{name}() {{\n  if (( CURRENT == 2 )); then\n");
        out += "    local -a commands=(\n";
        for c in &self.info.commands {
            let _ = writeln!(out, "      {}", quoted(&format!("{}:{}", c.name, first_sentence(c.command.description))));
        }
        out += "    )\n    _describe command commands\n    _arguments '--help[what there is]' '--version[version, kernels, NCCL]'\n    return\n  fi\n";
        out += "  local command=$words[2]\n  shift words; (( CURRENT-- ))\n  case $command in\n";
        for c in &self.info.commands {
            let _ = writeln!(out, "    {}) _arguments -s \\", c.name);
            for flag in c.command.flags {
                let about = first_sentence(flag.description).replace(['[', ']'], "").replace(':', " -");
                let value = match (takes_value(flag), (self.values)(flag.long)) {
                    (false, _) => String::new(),
                    (true, Values::Folder) => ":folder:_files -/".into(),
                    (true, Values::File) => ":file:_files".into(),
                    (true, Values::Words(words)) => format!(":value:({})", words.join(" ")),
                    (true, Values::WordsOrFolder(words)) => format!(
                        ":value or folder:_alternative 'value:value:({})' 'folder:folder:_files -/'",
                        words.join(" ")
                    )
                    .replace('\'', "\""),
                    (true, Values::Any) => ":value: ".into(),
                };
                for spelling in spellings(flag) {
                    let _ = writeln!(out, "        {} \\", quoted(&format!("*{spelling}[{about}]{value}")));
                }
            }
            let rest = match (self.values)(c.name) {
                Values::Words(words) => format!("*:value:({})", words.join(" ")),
                _ => "*:text: ".into(),
            };
            let _ = writeln!(out, "        {} ;;", quoted(&rest));
        }
        let _ = write!(out, "  esac\n}}\n_{name} \"$@\"\n");
        out
    }

    pub fn fish(&self) -> String {
        let name = self.info.name;
        let mut out = format!(
            "# Completions of {name} for fish: put this file into ~/.config/fish/completions.\ncomplete -c {name} -f\n"
        );
        out += &format!("complete -c {name} -n __fish_use_subcommand -l help -d 'what there is'\ncomplete -c {name} -n __fish_use_subcommand -l version -d 'version, kernels, NCCL'\n");
        for c in &self.info.commands {
            let _ = writeln!(
                out,
                "complete -c {name} -n __fish_use_subcommand -a {} -d {}",
                c.name,
                quoted(&first_sentence(c.command.description))
            );
            let seen = format!("complete -c {name} -n '__fish_seen_subcommand_from {}'", c.name);
            for flag in c.command.flags {
                let short = flag.short.map_or(String::new(), |short| format!(" -s {short}"));
                let value = match (takes_value(flag), (self.values)(flag.long)) {
                    (false, _) => String::new(),
                    (true, Values::Folder) => " -x -a '(__fish_complete_directories)'".into(),
                    (true, Values::File) => " -r -F".into(),
                    (true, Values::Words(words)) => format!(" -x -a {}", quoted(&words.join(" "))),
                    (true, Values::WordsOrFolder(words)) => {
                        format!(" -x -a {}", quoted(&format!("{} (__fish_complete_directories)", words.join(" "))))
                    }
                    (true, Values::Any) => " -x".into(),
                };
                let long = flag.long.trim_start_matches("--");
                let _ =
                    writeln!(out, "{seen} -l {long}{short}{value} -d {}", quoted(&first_sentence(flag.description)));
            }
            if let Values::Words(words) = (self.values)(c.name) {
                let _ = writeln!(out, "{seen} -a {}", quoted(&words.join(" ")));
            }
        }
        out
    }
}

fn takes_value(flag: &FlagInfo) -> bool {
    matches!(flag.kind, FlagInfoKind::Option { .. })
}

/// `-m`, `--model`
fn spellings(flag: &FlagInfo) -> Vec<String> {
    flag.short.map(|short| format!("-{short}")).into_iter().chain([flag.long.to_string()]).collect()
}

/// The description up to its first stop, semicolon or bracket: the rest is for --help.
fn first_sentence(text: &str) -> String {
    let text = text.split(" (").next().unwrap_or_default().split(';').next().unwrap_or_default();
    text.split(". ").next().unwrap_or_default().trim_end_matches('.').trim().to_string()
}

/// In single quotes, for all three shells.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "\u{2019}"))
}
