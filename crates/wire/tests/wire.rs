//! The codec: our bytes against those of others, and against what we read.

mod wire {
    mod golden;
    mod large_bodies;
    mod roundtrip;
}
