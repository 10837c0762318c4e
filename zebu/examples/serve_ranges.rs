//! A server of ranges of an image on tokio: HTTP/1.1, `GET` and `HEAD`, with `Range: bytes=A-B`.
//!
//! The threads of [`Remote`] do the I/O; its futures are `Send`, so connections are ordinary
//! tasks of tokio. Try it with `curl -r 0-511 http://127.0.0.1:PORT/`, or name the URL to a
//! program that reads disks over HTTP.
//!
//! Usage: `serve_ranges IMAGE [ADDRESS:PORT]`

use std::ops::Range;
use std::sync::Arc;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use zebu::{Device, OpenOptions, Queue, QueueOptions, Remote, Result, SharedDevice, Source};

/// Bytes of a request's header at most.
const MAX_HEADER: u64 = 8 << 10;
/// Bytes that are read at a time: all that a connection holds in memory.
const PART: u64 = 256 << 10;

/// A client's request.
struct Request {
    method: String,
    range: Option<String>,
}

/// Reads the header of a request. None: the client has closed the connection.
async fn read_request(stream: &mut BufReader<TcpStream>) -> std::io::Result<Option<Request>> {
    let mut header = stream.take(MAX_HEADER);
    let mut line = String::new();
    if header.read_line(&mut line).await? == 0 {
        return Ok(None);
    }
    let method = line.split(' ').next().unwrap_or_default().to_string();
    let mut range = None;
    loop {
        line.clear();
        if header.read_line(&mut line).await? == 0 {
            return Err(std::io::ErrorKind::InvalidData.into());
        }
        match line.trim_end().split_once(':') {
            Some((name, value)) if name.eq_ignore_ascii_case("range") => {
                range = Some(value.trim().to_string());
            }
            None if line.trim_end().is_empty() => return Ok(Some(Request { method, range })),
            _ => {}
        }
    }
}

/// `bytes=A-B`, `bytes=A-` or `bytes=-N` of a disk of `size` bytes.
fn parse_range(text: &str, size: u64) -> Option<Range<u64>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let range = match (first, last) {
        ("", count) => size.saturating_sub(count.parse().ok()?)..size,
        (first, "") => first.parse().ok()?..size,
        (first, last) => {
            let last: u64 = last.parse().ok()?;
            first.parse().ok()?..last.saturating_add(1).min(size)
        }
    };
    (range.start < range.end).then_some(range)
}

async fn serve(disk: Arc<Remote>, stream: TcpStream) -> std::io::Result<()> {
    let mut stream = BufReader::new(stream);
    let device = disk.device().enter().await;
    let size = device.map_err(std::io::Error::other)?.size();
    while let Some(request) = read_request(&mut stream).await? {
        let (status, range) = match (request.method.as_str(), &request.range) {
            ("GET" | "HEAD", None) => ("200 OK", 0..size),
            ("GET" | "HEAD", Some(text)) => match parse_range(text, size) {
                Some(range) => ("206 Partial Content", range),
                None => ("416 Range Not Satisfiable", 0..0),
            },
            _ => ("405 Method Not Allowed", 0..0),
        };
        let mut header = format!(
            "HTTP/1.1 {status}\r\nAccept-Ranges: bytes\r\nContent-Length: {}\r\n",
            range.end - range.start
        );
        if status.starts_with("206") {
            let last = range.end - 1;
            header += &format!("Content-Range: bytes {}-{last}/{size}\r\n", range.start);
        }
        stream.write_all(header.as_bytes()).await?;
        stream.write_all(b"\r\n").await?;
        if request.method == "GET" {
            send(&disk, &mut stream, range).await?;
        }
        stream.flush().await?;
    }
    Ok(())
}

/// Sends the range. The next part is read while one is sent.
async fn send(
    disk: &Remote,
    stream: &mut BufReader<TcpStream>,
    range: Range<u64>,
) -> std::io::Result<()> {
    let read = |at: u64| (at < range.end).then(|| disk.read(at, PART.min(range.end - at) as usize));
    let mut at = range.start;
    let mut next = read(at);
    while let Some(part) = next {
        // The header is sent already: an error can only end the connection.
        let part = part.await.map_err(std::io::Error::other)?;
        at += part.len() as u64;
        next = read(at);
        stream.write_all(&part).await?;
    }
    Ok(())
}

fn open(path: &str) -> Result<Remote> {
    let queue = Queue::new(QueueOptions::default())?;
    let source = Source::Name(path.into());
    let device = Device::open(&queue, &source, &OpenOptions::default())?;
    Ok(Remote::new(
        SharedDevice::new(device),
        2,
        &QueueOptions::default(),
    )?)
}

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args
        .next()
        .expect("usage: serve_ranges IMAGE [ADDRESS:PORT]");
    let address = args.next().unwrap_or_else(|| "127.0.0.1:0".into());
    let disk = match open(&path) {
        Ok(disk) => Arc::new(disk),
        Err(e) => {
            eprintln!("serve_ranges: {path}: {e}");
            std::process::exit(1);
        }
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    runtime.block_on(async {
        let listener = TcpListener::bind(address).await?;
        println!("http://{}/", listener.local_addr()?);
        loop {
            let (stream, client) = listener.accept().await?;
            let disk = disk.clone();
            tokio::spawn(async move {
                if let Err(e) = serve(disk, stream).await {
                    eprintln!("serve_ranges: {client}: {e}");
                }
            });
        }
    })
}
