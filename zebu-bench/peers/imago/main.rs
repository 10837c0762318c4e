//! Random reads of 4 KiB by the library imago, in one thread: IMAGE none|writeback DEPTH COUNT. Prints how many
//! seconds they took.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Instant;

use imago::file::File;
use imago::io_buffers::IoBuffer;
use imago::qcow2::Qcow2;
use imago::{FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, StorageOpenOptions};

const BLOCK: u64 = 4096;

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [image, cache, depth, count] = &arguments[..] else {
        return Err(std::io::Error::other("usage: IMAGE none|writeback DEPTH COUNT"));
    };
    let number = |text: &String| text.parse::<u64>().map_err(std::io::Error::other);
    let (depth, left) = (number(depth)?, Rc::new(Cell::new(number(count)?)));
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let storage = StorageOpenOptions::new().direct(cache == "none");
        let image = Qcow2::<File>::builder_path(image).storage_open_options(storage);
        let image = image.open(PermissiveImplicitOpenGate::default()).await?;
        let image = Rc::new(FormatAccess::new(image));
        let blocks = (image.size() / BLOCK).max(1);
        let start = Instant::now();
        let readers = (0..depth).map(|reader| {
            let (image, left) = (image.clone(), left.clone());
            tokio::task::spawn_local(async move {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(reader + 1);
                let mut buffer = IoBuffer::new(BLOCK as usize, BLOCK as usize)?;
                while let Some(next) = left.get().checked_sub(1) {
                    left.set(next);
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    image.read(&mut buffer, (random >> 8) % blocks * BLOCK).await?;
                }
                Ok::<_, std::io::Error>(())
            })
        });
        for reader in readers.collect::<Vec<_>>() {
            reader.await.map_err(std::io::Error::other)??;
        }
        println!("Run completed in {:.6} seconds.", start.elapsed().as_secs_f64());
        Ok(())
    })
}
