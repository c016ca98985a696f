//! A chat template; what follows zero bytes are the messages.

#![no_main]

use libfuzzer_sys::fuzz_target;
use tightfit_fuzz::{check, init, says};
use tightfit_text::{ChatTemplate, Message, SpecialToken, SpecialTokens};

const ROLES: [&str; 3] = ["system", "user", "assistant"];

fuzz_target!(init: init(), |input: &[u8]| {
    if let Ok(input) = std::str::from_utf8(input) {
        check(input.as_bytes(), || render(input));
    }
});

fn render(input: &str) {
    let mut parts = input.split('\0');
    let source = parts.next().unwrap_or_default();
    let token = |content: &str| {
        Some(SpecialToken {
            id: 0,
            content: content.to_owned(),
        })
    };
    let tokens = SpecialTokens {
        bos: token("<s>"),
        eos: token("</s>"),
        pad: None,
        unk: None,
    };
    let template = match ChatTemplate::new(source, &tokens) {
        Ok(template) => template,
        Err(error) => return says(error),
    };
    let roles = ROLES.iter().cycle();
    let messages: Vec<Message> = roles
        .zip(parts)
        .map(|(&role, content)| Message {
            role: role.to_owned(),
            content: content.to_owned(),
        })
        .collect();
    template.render(&messages, true).map(drop).unwrap_or_else(says);
    match (template.render(&messages, false), template.segments(&messages)) {
        (Ok(whole), Ok(segments)) => {
            let joined: String = segments.iter().map(|segment| segment.text.as_str()).collect();
            assert_eq!(joined, whole);
        }
        (Ok(_), Err(error)) | (Err(error), _) => says(error),
    }
}
