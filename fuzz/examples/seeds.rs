//! Writes images of the generator into a directory, `seeds DIRECTORY COUNT`, or
//! its tables, `seeds DIRECTORY COUNT tables`.

use std::path::PathBuf;

use zebu_fuzz::hostile_images;

fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().expect("a directory"));
    let count = arguments
        .next()
        .map_or(100, |n| n.parse().expect("a number"));
    let tables = arguments.next().is_some();
    std::fs::create_dir_all(&directory)?;
    for seed in 0..count {
        let mut rng = hostile_images::Rng::new(seed);
        let bytes = match tables {
            true => hostile_images::table(&mut rng),
            false => hostile_images::build(&mut rng, 128 << 10),
        };
        std::fs::write(directory.join(format!("generated-{seed}")), bytes)?;
    }
    Ok(())
}
