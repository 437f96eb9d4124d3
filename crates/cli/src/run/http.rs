//! Work by an HTTP endpoint: the message is posted, facts are in the headers, and the status decides.

use std::time::Duration;

use bytes::Bytes;
use leveret::Failure;
use leveret::amqp::Tls;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Response, StatusCode, Url};
use tokio::time::{timeout, timeout_at};

use super::work::{Answer, Output, took_too_long};
use crate::failure::{self, last_cause};
use crate::http::{client_for, is_web, shown};
use crate::reach::deadline_in;

/// How large a reply may be.
const MAX_REPLY: usize = 16 * 1024 * 1024;
/// How much of an error is kept.
const MAX_COMPLAINT: usize = 2000;
/// How long a response may take whose body decides nothing.
const BODY_GRACE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct Http {
    client: reqwest::Client,
    url: Url,
    /// As it is told to people, and kept with parked messages.
    shown: String,
}

/// Whether a URL is one of an endpoint.
pub(super) fn check(url: &str) -> Result<Url, String> {
    match Url::parse(url) {
        Ok(url) if is_web(&url) => Ok(url),
        Ok(url) => Err(format!("{} is no URL that begins with http:// or https://", shown(&url))),
        Err(error) => Err(format!("http: no URL: {error}")),
    }
}

impl Http {
    pub(super) async fn new(url: String) -> Result<Self, failure::Failure> {
        let url = check(&url).map_err(failure::Failure::wrong)?;
        let client = client_for(&url, &Tls::default()).await?.build();
        let client = client.map_err(failure::Failure::new)?;
        Ok(Http { client, shown: shown(&url), url })
    }

    pub(super) async fn post(
        &self,
        facts: &[(&'static str, String)],
        body: Bytes,
        output: Output,
        within: Duration,
    ) -> Result<Answer, Failure> {
        let request = self.client.post(self.url.clone()).headers(headers(facts)).body(body);
        let deadline = deadline_in(within);
        let response = timeout_at(deadline, request.send()).await;
        let response = response.map_err(|_| took_too_long(within))?.map_err(|error| {
            Failure::retry(format!("{} does not answer: {}", self.shown, last_cause(&error)))
                .kind("http")
        })?;
        let status = response.status();
        let wait = retry_after(response.headers());
        if status.is_success() && output == Output::Reply {
            let content_type =
                response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
            let content_type = content_type.map(str::to_owned);
            let body = timeout_at(deadline, read(response, MAX_REPLY)).await;
            let body = body.map_err(|_| took_too_long(within))??;
            return Ok(Answer { body: body.into(), content_type });
        }
        // The status has decided. The connection can be used again only if the response was read; a long one costs the connection.
        let body = timeout(BODY_GRACE, read(response, MAX_COMPLAINT)).await;
        if status.is_success() {
            return Ok(Answer::default());
        }
        let body = body.ok().and_then(Result::ok).unwrap_or_default();
        let text = String::from_utf8_lossy(&body).trim().to_owned();
        let said = match text.as_str() {
            _ if status.is_redirection() => format!(
                "{} answered {status}, which is followed by nobody: give the address it leads to",
                self.shown
            ),
            "" => format!("{} answered {status}", self.shown),
            text => format!("{status}: {text}"),
        };
        let failure = match (may_go_better(status), wait) {
            (true, Some(wait)) => Failure::retry_after(wait, said),
            (true, None) => Failure::retry(said),
            (false, _) => Failure::permanent(said),
        };
        Err(failure.kind(format!("http-{}", status.as_u16())))
    }
}

/// Whether to try again: the server is at fault, or busy.
fn may_go_better(status: StatusCode) -> bool {
    let busy = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_EARLY, StatusCode::TOO_MANY_REQUESTS];
    status.is_server_error() || busy.contains(&status)
}

/// `Retry-After`, if it is a number of seconds.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds: u64 = headers.get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    // What asks for longer than a day is not believed.
    Some(Duration::from_secs(seconds.min(86_400)))
}

/// `Leveret-Routing-Key: order.new`; the type of the content is that of the request. What headers have no form for is left out.
fn headers(facts: &[(&'static str, String)]) -> HeaderMap {
    let mut headers = HeaderMap::new();
    for (name, value) in facts {
        let name = match *name {
            "content-type" => Some(CONTENT_TYPE),
            name => HeaderName::from_bytes(format!("leveret-{name}").as_bytes()).ok(),
        };
        if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(value.as_bytes())) {
            headers.insert(name, value);
        }
    }
    headers
}

/// The body, up to so many bytes. A longer reply is an error.
async fn read(mut response: Response, most: usize) -> Result<Vec<u8>, Failure> {
    let is_reply = response.status().is_success();
    let mut body = Vec::new();
    let broken = |error: reqwest::Error| {
        Failure::retry(format!("the answer broke off: {}", last_cause(&error))).kind("http")
    };
    while let Some(piece) = response.chunk().await.map_err(broken)? {
        body.extend_from_slice(&piece);
        if body.len() > most && is_reply {
            let text =
                format!("the answer has more than {} MiB, which is no reply", most / 1024 / 1024);
            return Err(Failure::permanent(text).kind("reply"));
        }
        if body.len() > most {
            body.truncate(most);
            break;
        }
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_address_is_named_without_secrets() {
        for url in ["http://shop:sesame@rabbit:99999/", "ftp://shop:sesame@rabbit/?token=sesame"] {
            let wrong = check(url).unwrap_err();
            assert!(!wrong.contains("sesame"), "{wrong}");
        }
        assert!(check("http://rabbit:99999/").unwrap_err().contains("port"));
    }

    #[test]
    fn what_is_told_of_an_endpoint_has_no_secrets() {
        let url = check("https://shop:secret@hooks.example:8443/bill?token=secret").unwrap();
        assert_eq!(shown(&url), "https://hooks.example:8443/bill");
        assert_eq!(shown(&check("http://[::1]/").unwrap()), "http://[::1]/");
        assert!(check("ftp://hooks.example").unwrap_err().contains("http:// or https://"));
    }
}
