//! The storages of an image: delayed memory, files, another image, what a filter makes of a file, an NBD server.

use super::*;

/// A kind of storage for images.
pub trait Place {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage>;
    fn queue(&self) -> Queue;
    /// The size of the blocks in which requests wait for each other.
    fn block(&self) -> usize;
    /// Whether operations make progress in each turn, without waiting.
    fn is_prompt(&self) -> bool;
}

/// Memory whose operations take some turns.
pub struct Delayed;

impl Place for Delayed {
    fn storage(&self, _: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let disk = Disk::new(Some(Rng::new(rng.next())), None);
        disk.files(vec![bytes.to_vec()]).remove(0)
    }

    fn queue(&self) -> Queue {
        let options = QueueOptions::default()
            .engine(EngineKind::Threads)
            .inflate_inline(true);
        Queue::new(options).unwrap()
    }

    fn block(&self) -> usize {
        1
    }

    fn is_prompt(&self) -> bool {
        true
    }
}

/// Files, with an engine.
pub struct Files {
    pub folder: tempfile::TempDir,
    pub engine: EngineKind,
    pub cache: CacheMode,
}

impl Place for Files {
    fn storage(&self, name: &str, bytes: &[u8], _: &mut Rng) -> Arc<dyn Storage> {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let how = OpenFile::default().write(true).cache(self.cache);
        open_file(path, how).unwrap()
    }

    fn queue(&self) -> Queue {
        let options = QueueOptions::default()
            .engine(self.engine)
            .inflate_inline(true);
        Queue::new(options).unwrap()
    }

    fn block(&self) -> usize {
        if self.cache == CacheMode::None {
            4096
        } else {
            1
        }
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

/// Bytes of a storage that cannot grow.
pub const FIXED_SIZE: u64 = 64 << 20;

/// The disks of other images, which are in files.
pub struct Nested(pub Files, pub Cell<u32>);

impl Place for Nested {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let queue = self.queue();
        self.1.set(self.1.get() + 1);
        let name = format!("{name}{}", self.1.get());
        let file = self.0.storage(&name, &[], rng);
        let options = CreateQcow2::default().size(FIXED_SIZE).cluster_bits(12);
        queue
            .block_on(create_qcow2(&queue, &*file, None, &options, |_| {}))
            .unwrap();
        let write = OpenOptions::default().write(true);
        let device = Device::from_storage(&queue, file, &write).unwrap();
        device.write_blocking(&queue, 0, bytes).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        raw_over(&queue, &self.0, &name, "file.driver=qcow2")
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    /// A cluster of the other image.
    fn block(&self) -> usize {
        4096
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

/// The storage of a raw image over a file with what these options put over it.
fn raw_over(queue: &Queue, files: &Files, name: &str, over: &str) -> Arc<dyn Storage> {
    let path = files.folder.path().join(name);
    let path = path.display();
    let source = format!("driver=raw,{over},file.file.driver=file,file.file.filename={path}");
    let write = OpenOptions::default().write(true);
    let device = Device::open(queue, &Source::Options(source.into()), &write).unwrap();
    let Some(raw) = device.top().as_raw() else {
        unreachable!("opened as raw");
    };
    raw.storage().clone()
}

/// Files with a filter over them.
pub struct Filtered(pub Files, pub &'static str);

/// A filter of debug builds that changes bytes.
pub const XOR: &str = "file.driver=xor,file.key=23";

impl Place for Filtered {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let mut bytes = bytes.to_vec();
        if self.1 == XOR {
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte ^= 23 ^ (at >> 9) as u8;
            }
        }
        drop(self.0.storage(name, &bytes, rng));
        raw_over(&self.queue(), &self.0, name, self.1)
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    fn block(&self) -> usize {
        1
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

/// Exports of NBD servers.
pub struct Exports(pub Files, pub RefCell<Vec<Child>>);

impl Place for Exports {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        self.end();
        drop(self.0.storage(name, bytes, rng));
        let path = self.0.folder.path().join(name);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(FIXED_SIZE).unwrap();
        let socket = self.0.folder.path().join("socket");
        let server = Command::new("qemu-nbd")
            .args(["-t", "-e", "8", "-f", "raw", "-k"])
            .args([&socket, &path])
            .spawn()
            .unwrap();
        self.1.borrow_mut().push(server);
        while !socket.exists() {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut options = NbdOptions::new(NbdServer::Unix(socket), "");
        options.write = true;
        options.cache = self.0.cache;
        // The socket exists shortly before the server listens.
        options.open_timeout = Duration::from_secs(30);
        Arc::new(Nbd::open(options).unwrap())
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    fn block(&self) -> usize {
        1
    }

    fn is_prompt(&self) -> bool {
        false
    }
}

impl Exports {
    pub fn end(&self) {
        for mut server in self.1.borrow_mut().drain(..) {
            let _ = server.kill();
            let _ = server.wait();
        }
        let _ = std::fs::remove_file(self.0.folder.path().join("socket"));
    }
}

impl Drop for Exports {
    fn drop(&mut self) {
        self.end();
    }
}
