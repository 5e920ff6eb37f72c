//! What does not compile: misuse that other runtimes leave to the caller's care. Each file of `compile_fail/` is one, with what the compiler says of it
//! beside it. The file of `compile_pass/` is a whole program that needs no `unsafe`.
//!
//! The messages are those of one release of the compiler; another's are not compared. To write them anew: `TRYBUILD=overwrite cargo test --test compile_fail`.

use std::process::Command;

/// The release whose messages the files hold.
const RELEASE: &str = "rustc 1.95.";

#[test]
fn t11_05_misuse_does_not_compile() {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let Ok(version) = Command::new(rustc).arg("--version").output() else {
        eprintln!("there is no compiler here: nothing is compiled");
        return;
    };
    let version = String::from_utf8_lossy(&version.stdout);
    let cases = trybuild::TestCases::new();
    cases.pass("tests/compile_pass/*.rs");
    if !version.starts_with(RELEASE) {
        eprintln!("the messages are those of {RELEASE}*, not of {version}: not compared");
        return;
    }
    cases.compile_fail("tests/compile_fail/*.rs");
    #[cfg(feature = "cuda-any")]
    cases.compile_fail("tests/compile_fail/cuda/*.rs");
}
