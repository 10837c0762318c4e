//! Writes images of the generator into a directory: `seeds DIRECTORY COUNT`.

use std::path::PathBuf;

use zebu_fuzz::hostile_images;

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().expect("a directory"));
    let count = arguments
        .next()
        .map_or(100, |n| n.parse().expect("a number"));
    std::fs::create_dir_all(&directory)?;
    for seed in 0..count {
        let bytes = hostile_images::build(&mut hostile_images::Random(seed), 128 << 10);
        std::fs::write(directory.join(format!("generated-{seed}")), bytes)?;
    }
    Ok(())
}
