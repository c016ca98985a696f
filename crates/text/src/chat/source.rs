//! A template's source, before the engine compiles it: what the engine would not bound is refused or goes through [`super::bounds`].
//!
//! The engine's fuel pays for strings and steps, but not for what lists hold: added lists and lists of lists share their parts, so a
//! few steps double them. So lists and dictionaries that are written out, what `+` adds to and what `set` gives a name pass the filter
//! `_bounded`; attributes are set by a method of our own namespaces, as the engine's may hold themselves. Where this reads a source
//! in another way than the engine would, the template fails: nothing escapes, as the engine's own namespaces are not there.
//!
//! The engine also calls itself for each operator of an expression and each `elif`; how many there may be bounds its stack.

/// Tokens of an expression. Real ones have a few dozen.
const MOST_TOKENS: usize = 1000;
/// Branches of all conditions. Real templates have a few dozen.
const MOST_BRANCHES: usize = 500;

/// Words after which an operand follows: a bracket there begins a list.
const BEFORE_OPERANDS: [&str; 9] = ["and", "or", "not", "in", "is", "if", "elif", "else", "do"];

/// The source to compile for the source of a template.
///
/// `{% generation %}` and `{% endgeneration %}`, with which transformers marks answers, become conditions that always hold: these
/// take the same blanks with them.
///
/// # Errors
/// What the template has too many of; `raw` blocks, which no chat template needs.
pub(super) fn instrumented(source: &str) -> Result<String, String> {
    let mut out = String::with_capacity(source.len() + source.len() / 4);
    let mut rest = source;
    let mut branches = 0;
    while let Some((before, kind)) = next_tag(rest) {
        let (data, tag) = rest.split_at(before);
        out.push_str(data);
        if kind == b'#' {
            let end = tag[2..].find("#}").map_or(tag.len(), |at| at + 4);
            let (comment, after) = tag.split_at(end);
            out.push_str(comment);
            rest = after;
            continue;
        }
        let (tag, after) = Tag::read(tag, if kind == b'%' { "%}" } else { "}}" })?;
        if kind == b'%' {
            match tag.word() {
                "raw" => return Err("`raw` blocks are not supported".into()),
                "elif" => branches += 1,
                _ => {}
            }
            if branches > MOST_BRANCHES {
                return Err(format!("more than {MOST_BRANCHES} `elif`"));
            }
            tag.write_statement(&mut out);
        } else {
            tag.write(&tag.tokens, &mut out);
            out.push_str(tag.end);
        }
        rest = after;
    }
    out.push_str(rest);
    Ok(out)
}

/// Where the next tag begins, and its second character.
fn next_tag(text: &str) -> Option<(usize, u8)> {
    let mut pairs = text.as_bytes().windows(2).enumerate();
    pairs.find_map(|(at, pair)| (pair[0] == b'{' && b"{%#".contains(&pair[1])).then_some((at, pair[1])))
}

/// A `{{ }}` or `{% %}`.
struct Tag<'s> {
    /// Its tokens, each with the blanks before it. The first is what opens the tag.
    tokens: Vec<Token<'s>>,
    /// What ends it, with the blanks before it; empty if nothing does.
    end: &'s str,
}

#[derive(Clone, Copy)]
struct Token<'s> {
    blanks: &'s str,
    text: &'s str,
}

impl<'s> Tag<'s> {
    /// Reads a tag from where it begins; also returns what comes after it.
    fn read(text: &'s str, end: &str) -> Result<(Self, &'s str), String> {
        let open = if text[2..].starts_with(['-', '+']) { 3 } else { 2 };
        let (text, mut rest) = text.split_at(open);
        let mut tokens = vec![Token { blanks: "", text }];
        let mut open_brackets = 0_i32;
        loop {
            let inside = rest.trim_ascii_start();
            let (blanks, _) = rest.split_at(rest.len() - inside.len());
            let control = usize::from(inside.starts_with(['-', '+']));
            if open_brackets == 0 && inside[control..].starts_with(end) {
                let (end, after) = rest.split_at(blanks.len() + control + end.len());
                return Ok((Self { tokens, end }, after));
            }
            let Some(first) = inside.chars().next() else {
                return Ok((Self { tokens, end: "" }, inside));
            };
            let (text, after) = inside.split_at(token_len(inside, first));
            match first {
                '(' | '[' | '{' => open_brackets += 1,
                ')' | ']' | '}' => open_brackets -= 1,
                _ => {}
            }
            // Of strings it is paid for.
            let multiplied = |token: &Token<'_>| is_operand(token.text, true) && !token.text.starts_with(['\'', '"']);
            if text == "*" && tokens[1..].last().is_some_and(multiplied) {
                return Err("the operator `*` is supported after strings only: it repeats lists for nothing".into());
            }
            tokens.push(Token { blanks, text });
            if tokens.len() > MOST_TOKENS {
                return Err(format!("an expression of more than {MOST_TOKENS} tokens"));
            }
            rest = after;
        }
    }

    /// The word that says which statement this is.
    fn word(&self) -> &'s str {
        self.tokens.get(1).map_or("", |token| token.text)
    }

    fn write_statement(&self, out: &mut String) {
        let assignment = self.tokens.iter().position(|token| token.text == "=");
        let (head, value) = match (self.word(), assignment) {
            ("set", Some(at)) => (&self.tokens[..at], &self.tokens[at + 1..]),
            ("for", _) => {
                // Brackets among the names hold no list.
                let names = self.tokens.iter().position(|token| token.text == "in").unwrap_or(0);
                self.tokens[..names].iter().for_each(|token| token.push_to(out));
                self.write(&self.tokens[names..], out);
                return out.push_str(self.end);
            }
            (word @ ("generation" | "endgeneration"), _) if self.tokens.len() == 2 => {
                self.tokens[0].push_to(out);
                out.push_str(self.tokens[1].blanks);
                out.push_str(if word == "generation" { "if true" } else { "endif" });
                return out.push_str(self.end);
            }
            _ => {
                self.write(&self.tokens, out);
                return out.push_str(self.end);
            }
        };
        match head {
            [open, set, namespace, dot, attribute] if dot.text == "." => {
                open.push_to(out);
                out.push_str(set.blanks);
                out.push_str(&format!("do {}._set('{}', (", namespace.text, attribute.text));
                self.write(value, out);
                out.push_str("))");
            }
            _ => {
                head.iter().for_each(|token| token.push_to(out));
                out.push_str(" = (");
                self.write(value, out);
                out.push_str(")|_bounded");
            }
        }
        out.push_str(self.end);
    }

    /// Writes an expression, with `_bounded` where it belongs.
    fn write(&self, tokens: &[Token<'s>], out: &mut String) {
        // For each open bracket, whether it began a list or a dictionary that is written out.
        let mut literals = Vec::new();
        let mut before = None;
        let mut named = false;
        for token in tokens {
            out.push_str(token.blanks);
            let first = token.text.bytes().next().unwrap_or_default();
            match first {
                b'(' => literals.push(false),
                b'[' | b'{' if !self.opens(token) => {
                    let literal = !before.is_some_and(|text| is_operand(text, named));
                    literals.push(literal);
                    if literal {
                        out.push('(');
                    }
                }
                b'+' if before.is_some_and(|text| is_operand(text, true)) => out.push_str("|_bounded"),
                _ => {}
            }
            out.push_str(token.text);
            if matches!(first, b')' | b']' | b'}') && literals.pop() == Some(true) {
                out.push_str("|_bounded)");
            }
            // An attribute or a filter may have any name.
            named = matches!(before, Some("." | "|"));
            before = Some(token.text).filter(|_| !self.opens(token));
        }
    }

    fn opens(&self, token: &Token<'s>) -> bool {
        std::ptr::eq(token.text, self.tokens[0].text)
    }
}

impl Token<'_> {
    fn push_to(&self, out: &mut String) {
        out.push_str(self.blanks);
        out.push_str(self.text);
    }
}

/// Bytes of the token that a text begins with. Numbers end before their dots and signs, which changes nothing here.
fn token_len(text: &str, first: char) -> usize {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_' || !c.is_ascii();
    if first == '\'' || first == '"' {
        let mut escaped = false;
        let end = text.bytes().skip(1).position(|byte| {
            let ends = !escaped && byte == first as u8;
            escaped = !escaped && byte == b'\\';
            ends
        });
        return end.map_or(text.len(), |at| at + 2);
    }
    if is_word(first) {
        return text.find(|c| !is_word(c)).unwrap_or(text.len());
    }
    let two = ["//", "**", "==", "!=", ">=", "<="]
        .iter()
        .any(|op| text.starts_with(op));
    if two { 2 } else { first.len_utf8() }
}

/// Whether a token ends an operand: a bracket after it is an index, a sign after it an operator.
fn is_operand(text: &str, any_name: bool) -> bool {
    let last = text.chars().next_back().unwrap_or_default();
    let word = last.is_ascii_alphanumeric() || last == '_' || !last.is_ascii();
    matches!(last, ')' | ']' | '}' | '\'' | '"') || (word && (any_name || !BEFORE_OPERANDS.contains(&text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_engine_does_not_bound_is_marked() {
        for (source, expected) in [
            ("a {b} {# {{ x + 1 #}", "a {b} {# {{ x + 1 #}"),
            ("{{- x[0] + '+ }}' +}}", "{{- x[0] |_bounded+ '+ }}' +}}"),
            (
                "{%- set x = [a, {'b': +c}] -%}",
                "{%- set x = ( ([a, ({'b': +c}|_bounded)]|_bounded))|_bounded -%}",
            ),
            ("{% set ns.x = a == b %}", "{% do ns._set('x', ( a == b)) %}"),
            ("{% set x %}{% endset %}", "{% set x %}{% endset %}"),
            ("{% for [a, b] in [c] %}", "{% for [a, b] in ([c]|_bounded) %}"),
            ("{{ x.in[0] ~ f(y)[1:] }}", "{{ x.in[0] ~ f(y)[1:] }}"),
            ("{%+ generation -%}x{% endgeneration %}", "{%+ if true -%}x{% endif %}"),
        ] {
            assert_eq!(instrumented(source).as_deref(), Ok(expected));
        }
        for source in ["{% raw %}{{ x }}{% endraw %}", "{%-raw-%}"] {
            assert!(instrumented(source).is_err());
        }
    }
}
