"""Gates: what a generation must prove before it may be published, each rule a function of its own."""
