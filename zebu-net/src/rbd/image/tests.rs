//! With a cluster that `ZEBU_CEPH_CONF` names the configuration of. Guards against dropped writes
//! that come back.

use std::future::{Future, poll_fn};
use std::task::Poll;

use super::{Rbd, RbdOptions};
use crate::storage::{
    CacheMode, Queue, QueueOptions, Storage, flush, read_vec, set_len, write_slice,
};

#[test]
fn dropped_writes_do_not_come_back() {
    let Some(conf) = std::env::var_os("ZEBU_CEPH_CONF") else {
        println!("skipped: ZEBU_CEPH_CONF names no cluster");
        return;
    };
    let queue = Queue::new(QueueOptions::default()).unwrap();
    let image = format!("zebu-dropped-{}", std::process::id());
    let options = RbdOptions {
        pool: "rbd".into(),
        namespace: String::new(),
        image: image.clone(),
        snapshot: None,
        conf: Some(conf.into()),
        user: None,
        key: None,
        set: Vec::new(),
        name: format!("rbd:rbd/{image}").into(),
        write: true,
        create: true,
        cache: CacheMode::WriteBack,
    };
    let storage = Rbd::open(options).unwrap();
    let (storage, queue) = (&storage, &queue);
    queue.block_on(async {
        for round in 0..60u8 {
            // Objects that do not exist, too.
            let start = u64::from(round % 20) << 20;
            if round % 20 == 0 {
                set_len(storage, queue, 0).await.unwrap();
            }
            for _ in 0..3 {
                let bytes = [200; 300_000];
                let mut write = Box::pin(write_slice(storage, queue, start + 100, &bytes));
                poll_fn(|context| Poll::Ready(write.as_mut().poll(context).is_ready())).await;
            }
            let wanted = [round; 200_000];
            write_slice(storage, queue, start + 5000, &wanted)
                .await
                .unwrap();
            if round % 2 == 0 {
                flush(storage, queue).await.unwrap();
            }
            let found = read_vec(storage, queue, start + 5000, wanted.len())
                .await
                .unwrap();
            assert!(found == wanted, "round {round}");
            let length = start + 250_000;
            set_len(storage, queue, length).await.unwrap();
            assert_eq!(storage.len().unwrap(), length, "round {round}");
        }
        // Later as well.
        let found = read_vec(storage, queue, (19 << 20) + 5000, 200_000)
            .await
            .unwrap();
        assert!(found == [59; 200_000]);
    });
    storage.remove().unwrap();
}
