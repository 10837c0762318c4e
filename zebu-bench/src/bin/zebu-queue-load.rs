//! A program that embeds the library, for measurements: random reads of 4 KiB, by a queue that drives
//! itself, by the descriptor of one in an event loop, in Rust or in C, or by a `Remote`. Prints how
//! many seconds they took. C has the default cache mode.
//!
//! usage: zebu-queue-load IMAGE ENGINE driven|descriptor|c|remote DEPTH COUNT [CACHE]

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::future::Future;
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Instant;

// Its functions are those of the C library.
use zebu_capi as _;

use zebu::{
    Buffer, Device, EngineKind, OpenOptions, Queue, QueueOptions, Remote, RemoteRequest,
    SharedDevice, Source,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const BLOCK: usize = 4096;

/// The reads that are left, and where the next one is.
struct Load {
    depth: usize,
    left: u64,
    blocks: u64,
    random: u64,
}

impl Load {
    fn next(&mut self) -> Option<u64> {
        self.left = self.left.checked_sub(1)?;
        // xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        Some((self.random >> 8) % self.blocks * BLOCK as u64)
    }
}

fn main() -> ExitCode {
    match run(&std::env::args().skip(1).collect::<Vec<_>>()) {
        Ok(seconds) => {
            println!("Run completed in {seconds:.6} seconds.");
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("zebu-queue-load: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<f64> {
    let [image, engine, way, depth, count, cache @ ..] = arguments else {
        return Err("usage: IMAGE ENGINE driven|descriptor|c|remote DEPTH COUNT [CACHE]".into());
    };
    let mut open = OpenOptions::default();
    if let Some(cache) = cache.first() {
        open = open.cache(cache.parse()?);
    }
    let engine: EngineKind = engine.parse()?;
    let options = QueueOptions::default().engine(engine).inflate_inline(true);
    let queue = Queue::new(options.clone())?;
    let source = Source::Name(image.into());
    let device = Device::open(&queue, &source, &open)?;
    let load = Load {
        depth: depth.parse()?,
        left: count.parse()?,
        blocks: (device.size() / BLOCK as u64).max(1),
        random: 0x9e37_79b9_7f4a_7c15,
    };
    match &**way {
        "driven" => driven(&queue, device, load),
        "descriptor" => by_descriptor(&queue, device, load),
        "remote" => {
            let remote = Remote::new(SharedDevice::new(device), 1, &options)?;
            by_remote(&remote, load)
        }
        "c" => in_c(image, engine, load),
        _ => Err(format!("no way '{way}'").into()),
    }
}

fn wait(descriptor: RawFd) -> Result<()> {
    let mut polled = libc::pollfd {
        fd: descriptor,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one entry, which is ours.
    while unsafe { libc::poll(&mut polled, 1, -1) } < 0 {
        let error = std::io::Error::last_os_error();
        if error.kind() != std::io::ErrorKind::Interrupted {
            return Err(error.into());
        }
    }
    Ok(())
}

fn driven(queue: &Queue, device: Device, load: Load) -> Result<f64> {
    let (device, start) = (Arc::new(device), Instant::now());
    let readers = load.depth;
    let load = Rc::new(RefCell::new(load));
    let readers: Vec<_> = (0..readers)
        .map(|_| {
            let (device, clone, load) = (device.clone(), queue.clone(), load.clone());
            queue.spawn(async move {
                let mut buffer = Buffer::new(BLOCK);
                loop {
                    let next = load.borrow_mut().next();
                    let Some(at) = next else { return Ok(()) };
                    let (read, result) = device.read_buffer(&clone, at, buffer, BLOCK).await;
                    result?;
                    buffer = read;
                }
            })
        })
        .collect();
    for reader in readers {
        queue.block_on(reader).map_err(|e: zebu::Error| e)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

fn by_descriptor(queue: &Queue, device: Device, mut load: Load) -> Result<f64> {
    let device = Arc::new(device);
    while queue.turn() {}
    let ended = Rc::new(RefCell::new(Vec::new()));
    ended
        .borrow_mut()
        .extend((0..load.depth).map(|_| Ok(Buffer::new(BLOCK))));
    let (start, mut in_flight) = (Instant::now(), 0);
    loop {
        for buffer in ended.take() {
            let buffer = buffer?;
            let Some(at) = load.next() else { continue };
            in_flight += 1;
            let (device, clone, ended) = (device.clone(), queue.clone(), ended.clone());
            drop(queue.spawn(async move {
                let (buffer, result) = device.read_buffer(&clone, at, buffer, BLOCK).await;
                ended.borrow_mut().push(result.map(|()| buffer));
            }));
        }
        if in_flight == 0 {
            return Ok(start.elapsed().as_secs_f64());
        }
        wait(queue.as_raw_fd())?;
        while queue.turn() {}
        in_flight -= ended.borrow().len();
    }
}

/// Requests that were woken, and the thread that polls them.
struct Woken {
    places: Mutex<Vec<usize>>,
    thread: std::thread::Thread,
}

struct PlaceWaker(Arc<Woken>, usize);

impl Wake for PlaceWaker {
    fn wake(self: Arc<Self>) {
        self.0.places.lock().expect("no panic").push(self.1);
        self.0.thread.unpark();
    }
}

fn by_remote(remote: &Remote, mut load: Load) -> Result<f64> {
    let woken = Arc::new(Woken {
        places: Mutex::new((0..load.depth).collect()),
        thread: std::thread::current(),
    });
    let wakers: Vec<Waker> = (0..load.depth)
        .map(|place| Waker::from(Arc::new(PlaceWaker(woken.clone(), place))))
        .collect();
    let mut requests: Vec<Option<RemoteRequest<Buffer>>> = Vec::new();
    requests.resize_with(load.depth, || None);
    let (start, mut in_flight) = (Instant::now(), 0);
    loop {
        let places = std::mem::take(&mut *woken.places.lock().expect("no panic"));
        for &place in &places {
            let mut context = Context::from_waker(&wakers[place]);
            if let Some(request) = &mut requests[place] {
                match Pin::new(request).poll(&mut context) {
                    Poll::Ready(result) => drop(result?),
                    Poll::Pending => continue,
                }
                requests[place] = None;
                in_flight -= 1;
            }
            while let Some(at) = load.next() {
                let mut request = remote.read(at, BLOCK);
                match Pin::new(&mut request).poll(&mut context) {
                    Poll::Ready(result) => drop(result?),
                    Poll::Pending => {
                        requests[place] = Some(request);
                        in_flight += 1;
                        break;
                    }
                }
            }
        }
        if in_flight == 0 {
            return Ok(start.elapsed().as_secs_f64());
        }
        if places.is_empty() {
            std::thread::park();
        }
    }
}

#[repr(C)]
struct COptions {
    struct_size: usize,
    flags: u32,
    reserved: u32,
    engine: *const c_char,
}

#[repr(C)]
struct CCompletion {
    cookie: *mut c_void,
    error: *const c_void,
    result: c_int,
}

// As in zebu.h.
unsafe extern "C" {
    fn zebu_open(name: *const c_char, options: *const c_void, error: *mut c_void) -> *mut c_void;
    fn zebu_queue_new(options: *const COptions, error: *mut c_void) -> *mut c_void;
    fn zebu_queue_fd(queue: *mut c_void, error: *mut c_void) -> c_int;
    fn zebu_queue_read(
        queue: *mut c_void,
        device: *mut c_void,
        iov: *const libc::iovec,
        count: c_int,
        offset: u64,
        cookie: *mut c_void,
        error: *mut c_void,
    ) -> c_int;
    fn zebu_queue_complete(
        queue: *mut c_void,
        completions: *mut CCompletion,
        max: usize,
        error: *mut c_void,
    ) -> isize;
}

/// By the C library's interface, as in `zebu-capi/examples/event_loop.c`.
fn in_c(image: &str, engine: EngineKind, mut load: Load) -> Result<f64> {
    let none = std::ptr::null_mut;
    let (image, name) = (CString::new(image)?, CString::new(engine.name())?);
    let options = COptions {
        struct_size: size_of::<COptions>(),
        flags: 1, // ZEBU_QUEUE_INFLATE_INLINE
        reserved: 0,
        engine: name.as_ptr(),
    };
    // SAFETY: the arguments are as the header wants them; they are never freed.
    let (device, queue, descriptor) = unsafe {
        let device = zebu_open(image.as_ptr(), std::ptr::null(), none());
        let queue = zebu_queue_new(&options, none());
        (device, queue, zebu_queue_fd(queue, none()))
    };
    let mut memory: Vec<Buffer> = (0..load.depth).map(|_| Buffer::new(BLOCK)).collect();
    let mut free: Vec<usize> = (0..load.depth).collect();
    let (start, mut in_flight) = (Instant::now(), 0);
    loop {
        while let Some(place) = free.pop() {
            let Some(at) = load.next() else { break };
            let iov = libc::iovec {
                iov_base: memory[place].as_mut_ptr().cast(),
                iov_len: BLOCK,
            };
            let cookie = place as *mut c_void;
            // SAFETY: the memory lives until the end, and each request has its own.
            let code = unsafe { zebu_queue_read(queue, device, &iov, 1, at, cookie, none()) };
            if code < 0 {
                return Err(std::io::Error::from_raw_os_error(-code).into());
            }
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(start.elapsed().as_secs_f64());
        }
        wait(descriptor)?;
        loop {
            let mut ended = [const {
                CCompletion {
                    cookie: std::ptr::null_mut(),
                    error: std::ptr::null(),
                    result: 0,
                }
            }; 64];
            // SAFETY: there is room for as many.
            let count =
                unsafe { zebu_queue_complete(queue, ended.as_mut_ptr(), ended.len(), none()) };
            if count <= 0 {
                break;
            }
            for completion in &ended[..count as usize] {
                if completion.result < 0 {
                    return Err(std::io::Error::from_raw_os_error(-completion.result).into());
                }
                free.push(completion.cookie as usize);
                in_flight -= 1;
            }
        }
    }
}
