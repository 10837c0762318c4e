//! A root without /etc and /dev, as a container of the static program has it: plain http needs no
//! certificates, `localhost` is this machine, and random numbers come from the kernel.

use std::net::TcpListener;

use crate::common::store::Store;
use crate::common::web::{Behaviour, images, served};
use crate::common::{Answer, Lab, Limits, beyond_qemu};

/// Runs the program without the files of /etc; `None` if nothing can be mounted.
fn without_etc(lab: &Lab, script: &str, args: &[&str]) -> Option<Answer> {
    let script = format!(
        "mount -t tmpfs none /etc && unset SSL_CERT_FILE SSL_CERT_DIR && echo mounted && {script}"
    );
    lab.in_namespace(&script, args, &Limits::default())
}

/// A port that is free.
fn port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

#[test]
fn plain_http_needs_no_certificates() {
    if beyond_qemu("a server of the test") {
        return;
    }
    let lab = images(5 << 20);
    let bare = |args: &[&str]| without_etc(&lab, "exec \"$0\" \"$@\"", args);
    let web = served(&lab, "x.qcow2", Behaviour::default());
    for host in ["127.0.0.1", "localhost", "LocalHost"] {
        let url = web.url().replace("127.0.0.1", host);
        let Some(answer) = bare(&["convert", "-O", "raw", &url, "out.raw"]) else {
            return;
        };
        answer.ok(host);
        lab.assert_same_bytes("out.raw", "x.raw", host);
    }
    // Where they are needed, the message says where they are looked for, and what names others.
    let https = web.url().replace("http", "https");
    let lacking = |name: &str| {
        let answer = bare(&["info", name]).unwrap();
        for part in ["no CA certificates were found", "/etc/ssl/certs", "cacert"] {
            answer.fails_with(part);
        }
    };
    lacking(&https);
    web.change(|behaviour| behaviour.redirect = Some(https));
    lacking(&web.url());
    let s3 = "AWS_ACCESS_KEY_ID=a AWS_SECRET_ACCESS_KEY=b AWS_REGION=us-east-1";
    let store = Store::new();
    store.put(
        "bucket/x.qcow2",
        &std::fs::read(lab.path("x.qcow2")).unwrap(),
    );
    let of_store = |endpoint: &str| {
        let script = format!("{s3} AWS_ENDPOINT_URL={endpoint} exec \"$0\" \"$@\"");
        without_etc(&lab, &script, &["check", "s3://bucket/x.qcow2"]).unwrap()
    };
    of_store(&format!("http://localhost:{}", store.port())).ok("s3 over http");
    of_store("https://localhost:1").fails_with("no CA certificates were found");
}

#[test]
fn localhost_is_this_machine() {
    if beyond_qemu("a root without /etc/hosts") {
        return;
    }
    let lab = images(1 << 20);
    let script = "\"$0\" nbd -t -b localhost -p $1 --metrics localhost:$2 x.qcow2 &
        for n in $(seq 100); do
            \"$0\" info nbd://localhost:$1 2>/dev/null && break
            sleep 0.1
        done
        \"$0\" nbd -L -b localhost -p $1 && \"$0\" top -n1 -i0.1 localhost:$2
        status=$?
        kill $!
        exit $status";
    let ports = [port(), port()].map(|port| port.to_string());
    let ports = ports.each_ref().map(String::as_str);
    if let Some(answer) = without_etc(&lab, script, &ports) {
        let answer = answer.ok("nbd and metrics");
        for part in ["virtual size: 1 MiB", "exports available: 1", "clients:"] {
            assert!(answer.out.contains(part), "{part}: {answer:#?}");
        }
    }
}

#[test]
fn random_numbers_need_no_device() {
    if beyond_qemu("backups") {
        return;
    }
    let lab = images(1 << 20);
    let script = "mount -t tmpfs none /dev && exec \"$0\" \"$@\"";
    if let Some(answer) = without_etc(&lab, script, &["backup", "x.qcow2", "--to", "set"]) {
        answer.ok("backup");
    }
}
