//! Where the files of an image are: in delayed memory, on disk, in another image, on a server.

use super::*;

/// Where images of cases are kept.
pub trait Place {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage>;
    fn queue(&self) -> Queue;
    /// Whether requests of one block wait for each other, and how large these are.
    fn block(&self) -> usize;
    /// Whether every turn brings everything on its way.
    fn is_prompt(&self) -> bool;
}

/// Memory whose operations take a few turns.
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

/// Bytes that images may take where they cannot make their storage larger.
pub const ROOM: u64 = 64 << 20;

/// The disks of other images, which are files.
pub struct Nested(pub Files, pub Cell<u32>);

impl Place for Nested {
    fn storage(&self, name: &str, bytes: &[u8], rng: &mut Rng) -> Arc<dyn Storage> {
        let queue = self.queue();
        self.1.set(self.1.get() + 1);
        let name = format!("{name}{}", self.1.get());
        let file = self.0.storage(&name, &[], rng);
        let options = CreateQcow2::default().size(ROOM).cluster_bits(12);
        queue
            .block_on(create_qcow2(&queue, &*file, None, &options, |_| {}))
            .unwrap();
        let write = OpenOptions::default().write(true);
        let device = Device::from_storage(&queue, file, &write).unwrap();
        device.write_blocking(&queue, 0, bytes).unwrap();
        queue.block_on(device.close(&queue)).unwrap();
        let path = self.0.folder.path().join(name);
        let source = format!(
            "driver=raw,file.driver=qcow2,file.file.driver=file,file.file.filename={}",
            path.display()
        );
        let device = Device::open(&queue, &Source::Options(source.into()), &write).unwrap();
        let Some(raw) = device.top().as_raw() else {
            unreachable!("it was said to be raw");
        };
        raw.storage().clone()
    }

    fn queue(&self) -> Queue {
        self.0.queue()
    }

    /// A cluster of the image below.
    fn block(&self) -> usize {
        4096
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
        file.set_len(ROOM).unwrap();
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
        // The socket is there a moment before the server listens.
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
