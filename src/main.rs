//! Arguments -> command -> exit code. The only place that prints errors: one line on stderr.
use std::process::ExitCode;
use volley::cmd::{signal, terminal::tell};
use volley::text::shielded;
use volley::{cli, error};

fn main() -> ExitCode {
    signal::install();
    std::panic::set_hook(Box::new(|panic| {
        if shielded() {
            return; // becomes an error
        }
        tell(format_args!("error: internal: {}; please report this", panic.to_string().replace('\n', " ")));
        signal::leave(error::INTERNAL);
    }));
    let code = match cli::run(std::env::args_os()) {
        Ok(code) => code,
        Err(error) => {
            let code = error::exit_code(&error);
            if code != error::FINE {
                tell(format_args!("error: {}", error::line(&error)));
            }
            // At once: what libraries do at an exit may wait for kernels that never end.
            signal::leave(code)
        }
    };
    ExitCode::from(code)
}
