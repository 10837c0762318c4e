//! `top`: the rates and latencies of a server, live.

mod sample;
mod scrape;
mod screen;
mod view;

use std::ffi::{OsStr, OsString};
use std::io::{IsTerminal, Read};
use std::os::unix::ffi::OsStrExt;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::{CommandFactory, Parser};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use super::command::Command;
use crate::arguments::metrics_address::MetricsAddress;
use crate::arguments::size;
use crate::output::{self, localtime};
use crate::program::{Context, Failure, Outcome, signals};
use sample::Sample;
use screen::Screen;
use view::{Line, View};

pub const COMMAND: Command = Command {
    name: "top",
    operands: "<SOCKET>",
    summary: "Show rates and latencies of a server, live",
    options: Arguments::command,
    run,
    examples: "
        # A server with metrics, until it is killed
        zebu nbd --fork --pid-file disk.pid --metrics unix:$PWD/metrics.sock -t -k $PWD/disk.sock \
          disk.qcow2
        # Its rates in the last tenth of a second
        zebu top -n 1 -i 0.1 metrics.sock
        # Stop the server
        kill $(cat disk.pid)",
    ..Command::PLAIN
};

/// Show rates and latencies of a server that has --metrics, live
///
/// On a terminal the display is updated until q or Ctrl-C. Otherwise, and with --count, each update
/// is printed.
#[derive(Parser)]
pub struct Arguments {
    /// Number of updates that are printed before the end
    #[arg(short = 'n', long, value_name = "N")]
    count: Option<String>,
    /// Seconds between updates, 0.1 to 3600 (default 1)
    #[arg(short, long, value_name = "SECONDS")]
    interval: Option<String>,
    /// Address of the metrics: HOST:PORT, unix:PATH, or the path of the socket
    #[arg(value_name = "SOCKET")]
    names: Vec<OsString>,
}

/// What the display waits for.
enum Event {
    Fetched(Result<Sample, String>),
    Signal(i32),
    Key(u8),
}

/// Runs the command.
pub fn run(context: &Context, arguments: Vec<OsString>) -> Outcome {
    let arguments: Arguments = super::parse(context, arguments)?;
    let count = match &arguments.count {
        None => None,
        Some(text) => match size::number::<u64>(text) {
            Ok(count) if count > 0 => Some(count),
            _ => return Err(Failure::new(format!("Invalid count '{text}'"))),
        },
    };
    let interval = interval(arguments.interval.as_deref())?;
    let [name] = &arguments.names[..] else {
        return Err(Failure::new("Expecting one address of metrics").with_hint());
    };
    let source = Source {
        name: name.to_string_lossy().into_owned(),
        address: address(name),
    };
    match count.is_some() || !std::io::stdout().is_terminal() {
        true => source.print(interval, count),
        false => source.display(interval),
    }
}

fn interval(text: Option<&str>) -> Result<Duration, Failure> {
    let text = text.unwrap_or("1");
    match text.trim_start().parse::<f64>() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(Failure::new(format!(
            "Invalid interval '{text}': 0.1 to 3600 seconds are possible"
        ))),
    }
}

/// What is no address is the path of a socket.
fn address(name: &OsStr) -> MetricsAddress {
    MetricsAddress::parse(name.as_bytes()).unwrap_or_else(|| MetricsAddress::Unix(name.into()))
}

/// A server.
struct Source {
    name: String,
    address: MetricsAddress,
}

/// A sample, and when it was taken.
struct Taken(Instant, Sample);

impl Source {
    fn fetch(&self) -> Result<Sample, Failure> {
        let sample = fetch(&self.address);
        sample.map_err(|why| Failure::new(format!("No metrics from '{}': {why}", self.name)))
    }

    fn lines(&self, before: &Taken, after: &Taken) -> Vec<Line> {
        let view = View {
            address: &self.name,
            now: now(),
            before: &before.1,
            after: &after.1,
            seconds: (after.0 - before.0).as_secs_f64(),
        };
        view.lines()
    }

    /// Prints updates.
    fn print(&self, interval: Duration, count: Option<u64>) -> Outcome {
        let mut before = Taken(Instant::now(), self.fetch()?);
        let mut printed = 0;
        while count.is_none_or(|count| printed < count) {
            std::thread::sleep((before.0 + interval).saturating_duration_since(Instant::now()));
            let after = Taken(Instant::now(), self.fetch()?);
            let mut text = format!("{}\n", localtime::format(now() as i64));
            for (line, _) in self.lines(&before, &after) {
                if !line.is_empty() {
                    text.push_str(line.trim_end());
                    text.push('\n');
                }
            }
            text.push('\n');
            output::report(&text)?;
            (before, printed) = (after, printed + 1);
        }
        Ok(0)
    }

    /// Updates the terminal until the user or a signal ends it.
    fn display(&self, interval: Duration) -> Outcome {
        let first = Taken(Instant::now(), self.fetch()?);
        let (events, received) = mpsc::channel();
        let requests = self.start_threads(&events)?;
        let mut display = Display {
            source: self,
            screen: Some(Screen::enter()?),
            before: None,
            last: first,
            problem: None,
        };
        let mut next = display.last.0 + interval;
        let mut is_waiting = false;
        loop {
            display.show()?;
            match wait(&received, next) {
                None => {
                    // A server that is slow is asked less often.
                    if !std::mem::replace(&mut is_waiting, true) {
                        let _ = requests.send(());
                    }
                    next = Instant::now() + interval;
                }
                Some(Event::Fetched(sample)) => {
                    is_waiting = false;
                    display.update(sample);
                }
                Some(Event::Key(b'q' | b'Q')) | Some(Event::Signal(SIGINT)) => return Ok(0),
                Some(Event::Key(_)) => {}
                Some(Event::Signal(SIGWINCH)) => {}
                Some(Event::Signal(SIGTSTP)) => display.stop()?,
                Some(Event::Signal(signal)) => {
                    return Err(Failure::Said(signals::exit_status(signal)));
                }
            }
        }
    }

    /// Threads that turn what happens into events. What is sent to the answer is a request for a
    /// sample.
    fn start_threads(&self, events: &Sender<Event>) -> std::io::Result<Sender<()>> {
        let (requests, asked) = mpsc::channel();
        let (address, fetched) = (self.address.clone(), events.clone());
        std::thread::Builder::new().spawn(move || {
            while asked.recv().is_ok() && fetched.send(Event::Fetched(fetch(&address))).is_ok() {}
        })?;
        let caught = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH];
        let mut signals = Signals::new(signals::without_ignored(&caught))?;
        let signalled = events.clone();
        std::thread::Builder::new().spawn(move || {
            for signal in signals.forever() {
                let _ = signalled.send(Event::Signal(signal));
            }
        })?;
        let keys = events.clone();
        if std::io::stdin().is_terminal() {
            std::thread::Builder::new().spawn(move || {
                let mut key = [0];
                while matches!(std::io::stdin().read(&mut key), Ok(1))
                    && keys.send(Event::Key(key[0])).is_ok()
                {}
            })?;
        }
        Ok(requests)
    }
}

/// The display on a terminal.
struct Display<'a> {
    source: &'a Source,
    /// None while the process is stopped.
    screen: Option<Screen>,
    /// The sample before the last.
    before: Option<Taken>,
    last: Taken,
    /// Why there is no newer sample.
    problem: Option<String>,
}

impl Display<'_> {
    fn update(&mut self, sample: Result<Sample, String>) {
        match sample {
            Ok(sample) => {
                let taken = Taken(Instant::now(), sample);
                self.before = Some(std::mem::replace(&mut self.last, taken));
                self.problem = None;
            }
            Err(why) => self.problem = Some(why),
        }
    }

    fn show(&self) -> std::io::Result<()> {
        // Of one sample there are no rates.
        let before = self.before.as_ref().unwrap_or(&self.last);
        let mut lines = self.source.lines(before, &self.last);
        if let Some(why) = &self.problem {
            let text = format!("No metrics from '{}': {why}", self.source.name);
            lines[1] = (text, Some(crate::output::colours::Style::Red));
        }
        match &self.screen {
            Some(screen) => screen.show(&lines),
            None => Ok(()),
        }
    }

    /// Stops the process, as Ctrl-Z does, with the terminal as it was.
    fn stop(&mut self) -> std::io::Result<()> {
        self.screen = None;
        low_level::emulate_default_handler(SIGTSTP)?;
        self.screen = Some(Screen::enter()?);
        Ok(())
    }
}

fn fetch(address: &MetricsAddress) -> Result<Sample, String> {
    let sample = Sample::parse(&scrape::fetch(address)?);
    match sample.exports.is_empty() {
        true => Err("these are not metrics of zebu".into()),
        false => Ok(sample),
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.unwrap_or_default().as_secs_f64()
}

/// The next event; None when it is `until`.
fn wait(events: &Receiver<Event>, until: Instant) -> Option<Event> {
    let rest = until.saturating_duration_since(Instant::now());
    // The senders live as long as their threads, so an error is a timeout.
    events.recv_timeout(rest).ok()
}
