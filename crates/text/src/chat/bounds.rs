//! Values that templates build, kept from growing beyond what the fuel pays for.

use minijinja::value::{Enumerator, Object, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, escape_formatter, filters, functions};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Lists and dictionaries inside of each other. Tool descriptions, the deepest values of real conversations, have about ten.
const DEEPEST: usize = 32;

/// Values that a step pays for when a list or dictionary of them is looked at.
const VALUES_PER_FUEL: u64 = 16;

/// Bytes of text for each step that is left: writing them out will take that step.
const BYTES_PER_FUEL: u64 = 64;

/// Teaches an environment what instrumented sources (`source.rs`) call, and bounds the functions and filters that build lists of lists.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_filter("_bounded", bounded);
    environment.set_formatter(|out, state, value| escape_formatter(out, state, &bounded(state, value.clone())?));
    environment.add_function("namespace", namespace);
    environment.add_function("dict", checked(Value::from_function(functions::dict)));
    for (name, filter) in [
        ("map", Value::from_function(filters::map)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("groupby", Value::from_function(filters::groupby)),
        ("zip", Value::from_function(filters::zip)),
        ("chain", Value::from_function(filters::chain)),
    ] {
        environment.add_filter(name, checked(filter));
    }
}

fn refused(why: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, why)
}

/// The filter `_bounded`: the value itself, if it is not too large.
pub(super) fn bounded(state: &State, value: Value) -> Result<Value, Error> {
    if is_container(&value) {
        let mut walk = Walk::new(state);
        walk.visit(&value, 0)?;
        state.consume_fuel(walk.values / VALUES_PER_FUEL)?;
    }
    Ok(value)
}

/// A function of the engine whose results are bounded.
fn checked(
    function: Value,
) -> impl Fn(&mut State, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync + 'static {
    move |state, arguments| {
        let value = function.call(state, &arguments.into_values())?;
        bounded(state, value)
    }
}

fn is_container(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
}

/// Counts what a value holds, each time that it holds it.
struct Walk {
    values: u64,
    bytes: u64,
    most_values: u64,
    most_bytes: u64,
}

impl Walk {
    fn new(state: &State) -> Self {
        let fuel = state.fuel_levels().map_or(0, |(_, left)| left);
        Self {
            values: 0,
            bytes: 0,
            most_values: fuel.saturating_mul(VALUES_PER_FUEL),
            most_bytes: fuel.saturating_mul(BYTES_PER_FUEL),
        }
    }

    fn visit(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.values += 1;
        self.bytes += value.as_str().map_or(0, str::len) as u64;
        if self.values > self.most_values || self.bytes > self.most_bytes {
            return Err(Error::from(ErrorKind::OutOfFuel));
        }
        if depth > DEEPEST {
            return Err(refused("lists and dictionaries are nested too deep"));
        }
        if is_container(value) {
            for item in value.try_iter()? {
                self.visit(&item, depth + 1)?;
                if value.kind() == ValueKind::Map {
                    self.visit(&value.get_item(&item)?, depth + 1)?;
                }
            }
        }
        Ok(())
    }
}

/// What `namespace()` makes. The engine's own would also hold itself, and then anything that looks at all of it would never end.
#[derive(Debug, Default)]
struct Namespace(Mutex<BTreeMap<Arc<str>, Value>>);

impl Namespace {
    fn set(&self, state: &State, name: &str, value: Value) -> Result<(), Error> {
        let value = kept(bounded(state, value)?)?;
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(name.into(), value);
        Ok(())
    }
}

impl Object for Namespace {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        values.get(key.as_str()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Enumerator::Values(values.keys().cloned().map(Value::from).collect())
    }

    fn call_method(self: &Arc<Self>, state: &mut State<'_, '_>, method: &str, args: &[Value]) -> Result<Value, Error> {
        match (method, args) {
            ("_set", [name, value]) => {
                self.set(state, name.as_str().unwrap_or_default(), value.clone())?;
                Ok(Value::UNDEFINED)
            }
            _ => Err(ErrorKind::UnknownMethod.into()),
        }
    }
}

/// `namespace(values, name=value, …)`.
fn namespace(state: &mut State, arguments: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let namespace = Namespace::default();
    let values = Value::from_function(functions::dict).call(state, &arguments.into_values())?;
    for name in values.try_iter()? {
        let value = values.get_item(&name)?;
        namespace.set(state, name.as_str().unwrap_or_default(), value)?;
    }
    Ok(Value::from_object(namespace))
}

/// A copy of a bounded value that depends on nothing: no list that is still to be made, and no namespace.
fn kept(value: Value) -> Result<Value, Error> {
    if value.downcast_object_ref::<Namespace>().is_some() {
        return Err(refused("a namespace cannot hold a namespace"));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            Ok(Value::from(value.try_iter()?.map(kept).collect::<Result<Vec<_>, _>>()?))
        }
        ValueKind::Map => {
            let pair = |key: Value| Ok((key.clone(), kept(value.get_item(&key)?)?));
            let pairs = value.try_iter()?.map(pair).collect::<Result<Vec<_>, Error>>()?;
            Ok(Value::from_pairs(pairs))
        }
        ValueKind::Plain | ValueKind::Invalid => {
            Err(refused("a namespace holds text, numbers, lists and dictionaries only"))
        }
        _ => Ok(value),
    }
}
