//! A plan file that a run follows.

use std::error::Error;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tightfit_plan::file::PlanFile;

use crate::failure::Failure;
use crate::input::read_text;
use crate::job::{Job, JobError};
use crate::pretrained::Pretrained;
use crate::settings::{Request, Settings};

/// Most bytes of a plan file; 1024 layers take a fortieth of it.
const MAX_FILE: u64 = 1 << 30;

/// What targets of cards begin with.
const GPU: &str = "gpu-";

/// A plan file and the settings in it.
pub struct Followed {
    path: PathBuf,
    json: String,
    settings: Value,
    request: Request,
}

impl Followed {
    /// Reads a plan file as far as its settings.
    ///
    /// # Errors
    /// It is not readable or not a plan file.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        let bad = |error: Box<dyn Error + Send + Sync>| bad(path, error, Vec::new());
        let json = read_text(path, MAX_FILE).map_err(|error| bad(error.into()))?;
        let PlanFile { settings, target, .. } = PlanFile::parse(&json).map_err(|error| bad(error.into()))?;
        if target.starts_with(GPU) {
            let message = format!("it is of a card ({target}); `tightfit plan --device cpu` makes plans that run here");
            return Err(bad(message.into()));
        }
        let request =
            serde_json::from_value(settings.clone()).map_err(|error| bad(format!("settings: {error}").into()))?;
        Ok(Self {
            path: path.to_owned(),
            json,
            settings,
            request,
        })
    }

    /// The settings of the job that made the plan; facts of its machine are not among them.
    pub fn request(&self) -> Request {
        self.request.clone()
    }

    /// The job of `settings`, which may differ from the file's where the plan does not depend on it, with the plan's orders and
    /// offsets.
    ///
    /// # Errors
    /// The plan is not one of this job, or not legal.
    pub fn job(&self, settings: Settings, pretrained: Option<&Pretrained>) -> Result<Job, Failure> {
        let here = settings.to_json();
        Job::with_plan_file(settings, pretrained, &self.json).map_err(|error| match error {
            JobError::File(error) => bad(&self.path, error.into(), differences(&self.settings, &here)),
            other => other.into(),
        })
    }
}

fn bad(path: &Path, source: Box<dyn Error + Send + Sync>, differences: Vec<String>) -> Failure {
    Failure::PlanFile {
        path: path.to_owned(),
        source,
        differences,
    }
}

/// Settings of both that are not the same, in words.
fn differences(there: &Value, here: &Value) -> Vec<String> {
    let settings = there.as_object().into_iter().flatten();
    settings
        .filter(|(name, value)| here.get(name.as_str()).is_some_and(|own| own != *value))
        .map(|(name, value)| format!("{name} ({value} there, {} here)", here[name.as_str()]))
        .collect()
}
