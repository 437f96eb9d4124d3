//! Smaller programs than a given one, to find the smallest that still fails.

use leveret_wire::{Method, Properties, Table};

use super::program::{Op, Program, Publish, Step};

/// Programs with fewer steps: first without a half, then without a quarter… at last without a single one.
pub(super) fn shorter(program: &Program, size: usize) -> impl Iterator<Item = Program> {
    let count = program.steps.len();
    (0..count).step_by(size.max(1)).rev().map(move |start| {
        let mut steps = program.steps.clone();
        steps.drain(start..(start + size).min(count));
        Program { steps, ..program.clone() }
    })
}

/// Programs with as many steps, one of them simpler, or all of them on one channel.
pub(super) fn simpler(program: &Program) -> Vec<Program> {
    let with = |steps: Vec<Step>| Program { steps, ..program.clone() };
    let mut programs = Vec::new();
    if program.limited.is_some() {
        programs.push(Program { limited: None, ..program.clone() });
    }
    if program.steps.iter().any(|step| step.connection > 0) {
        let one = |step: &Step| Step { connection: 0, ..step.clone() };
        programs.push(with(program.steps.iter().map(one).collect()));
    }
    if program.steps.iter().any(|step| step.channel > 1) {
        let one = |step: &Step| Step { channel: 1, ..step.clone() };
        programs.push(with(program.steps.iter().map(one).collect()));
    }
    for (index, step) in program.steps.iter().enumerate() {
        for op in simpler_ops(&step.op) {
            let mut steps = program.steps.clone();
            steps[index].op = op;
            programs.push(with(steps));
        }
    }
    programs
}

/// Pushes what is made of a copy in which one flag is off.
macro_rules! without_flags {
    ($ops:ident, $method:ident, $($flag:ident)*) => {{$(
        if $method.$flag {
            let mut copy = $method.clone();
            copy.$flag = false;
            $ops.push(Op::Call(copy.into()));
        }
    )*}};
}

/// Pushes what is made of copies with one argument less.
macro_rules! without_arguments {
    ($ops:ident, $method:ident) => {
        for arguments in smaller_tables(&$method.arguments) {
            let mut copy = $method.clone();
            copy.arguments = arguments;
            $ops.push(Op::Call(copy.into()));
        }
    };
}

fn simpler_ops(op: &Op) -> Vec<Op> {
    let mut ops = Vec::new();
    match op {
        Op::Call(Method::QueueDeclare(method)) => {
            without_flags!(ops, method, durable exclusive auto_delete nowait);
            without_arguments!(ops, method);
        }
        Op::Call(Method::ExchangeDeclare(method)) => {
            without_flags!(ops, method, durable auto_delete internal nowait);
            without_arguments!(ops, method);
        }
        Op::Call(Method::BasicConsume(method)) => {
            without_flags!(ops, method, no_local no_ack exclusive nowait);
            without_arguments!(ops, method);
        }
        Op::Call(Method::QueueBind(method)) => without_arguments!(ops, method),
        Op::Call(Method::ExchangeBind(method)) => without_arguments!(ops, method),
        Op::Call(Method::QueueDelete(method)) => without_flags!(ops, method, if_unused if_empty),
        Op::Call(Method::BasicQos(method)) => without_flags!(ops, method, global),
        Op::Publish(publish) => {
            ops.extend(simpler_publishes(publish).into_iter().map(Box::new).map(Op::Publish))
        }
        _ => {}
    }
    ops
}

fn simpler_publishes(publish: &Publish) -> Vec<Publish> {
    let mut simpler = Vec::new();
    let mut push = |change: &dyn Fn(&mut Publish)| {
        let mut copy = publish.clone();
        change(&mut copy);
        simpler.push(copy);
    };
    if publish.times > 1 {
        push(&|copy| copy.times = 1);
        push(&|copy| copy.times -= 1);
    }
    if publish.method.mandatory {
        push(&|copy| copy.method.mandatory = false);
    }
    if publish.properties != Properties::default() {
        push(&|copy| copy.properties = Properties::default());
    }
    macro_rules! without {
        ($($name:ident)*) => {$(
            if publish.properties.$name.is_some() {
                push(&|copy| copy.properties.$name = None);
            }
        )*};
    }
    without!(content_type content_encoding headers delivery_mode priority correlation_id reply_to);
    without!(expiration message_id timestamp kind user_id app_id cluster_id);
    if let Some(headers) = &publish.properties.headers {
        for smaller in smaller_tables(headers) {
            push(&|copy| copy.properties.headers = Some(smaller.clone()));
        }
    }
    simpler
}

fn smaller_tables(table: &Table<'static>) -> Vec<Table<'static>> {
    let names: Vec<String> = table.iter().map(|(name, _)| name.to_string()).collect();
    let without = |name: &String| {
        let mut copy = table.clone();
        copy.remove(name);
        copy
    };
    names.iter().map(without).collect()
}
