//! What needs no server.

mod testkit {
    mod eventually;
    mod guardian;
    mod peer;
    mod proxy;
    mod with_servers;
}
