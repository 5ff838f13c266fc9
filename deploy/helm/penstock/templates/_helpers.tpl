{{- define "penstock.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "penstock.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "penstock.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of this release. */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ include "penstock.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "penstock.tlsSecret" -}}
{{- default (printf "%s-tls" (include "penstock.fullname" .)) .Values.tls.secretName -}}
{{- end -}}

{{/* A worker pool with what it leaves out, as JSON: (list $ pool). Its maps are merged into the defaults' maps, its
     lists replace the defaults' lists. So does its modelVolume: a volume has one source, and two would be merged here. */}}
{{- define "penstock.pool" -}}
{{- $root := index . 0 -}}
{{- $own := index . 1 -}}
{{- if not $own.model -}}
{{- fail (printf "workers: pool %s names no model: a name on the hub, or a path below /models, where its modelVolume is mounted" $own.name) -}}
{{- end -}}
{{- $pool := mergeOverwrite (deepCopy $root.Values.workerDefaults) (deepCopy $own) -}}
{{- $source := dict -}}
{{- range $kind, $it := ternary $own $pool (hasKey $own "modelVolume") | dig "modelVolume" dict -}}
{{- /* null takes a kind away. */ -}}
{{- if not (kindIs "invalid" $it) -}}
{{- $_ := set $source $kind $it -}}
{{- end -}}
{{- end -}}
{{- $_ := set $pool "modelVolume" $source -}}
{{- toJson $pool -}}
{{- end -}}

{{/* The Deployment of a pool: (list $ pool). */}}
{{- define "penstock.workerName" -}}
{{ include "penstock.fullname" (index . 0) }}-worker-{{ (index . 1).name }}
{{- end -}}

{{/* The API key by which a service is one: scheduler, workers and gateways. */}}
{{- define "penstock.serviceKey" -}}
{{- with .Values.keys }}
{{- if and .secretName .serviceKey.secretName }}
- name: PENSTOCK_KEY
  valueFrom: {secretKeyRef: {name: {{ .serviceKey.secretName }}, key: {{ .serviceKey.key }}}}
{{- else if .serviceKey.secretName }}
{{- fail "keys.serviceKey without keys.secretName: there is no keys file that could know the key" }}
{{- else if and .secretName (not $.Values.tls.enabled) }}
{{- fail "keys.secretName without tls.enabled: services without certificates need a key of the role service, keys.serviceKey" }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The keys file, which queue and scheduler read and nobody else. */}}
{{- define "penstock.keysEnv" -}}
{{- if .Values.keys.secretName }}
- {name: PENSTOCK_KEYS, value: /etc/penstock/keys/{{ .Values.keys.file }}}
{{- end }}
{{- end -}}

{{- define "penstock.keysMount" -}}
{{- if .Values.keys.secretName }}
# The directory, so that a changed Secret is seen.
- {name: keys, mountPath: /etc/penstock/keys, readOnly: true}
{{- end }}
{{- end -}}

{{- define "penstock.keysVolume" -}}
{{- if .Values.keys.secretName }}
- name: keys
  secret:
    secretName: {{ .Values.keys.secretName }}
    items: [{key: {{ .Values.keys.file }}, path: {{ .Values.keys.file }}}]
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Environment that all services have. */}}
{{- define "penstock.env" -}}
{{- if and .Values.tls.enabled .Values.insecure }}
{{- fail "insecure: true and tls.enabled: true contradict each other" }}
{{- else if .Values.tls.enabled }}
- {name: PENSTOCK_TLS_CERT, value: /etc/penstock/tls/tls.crt}
- {name: PENSTOCK_TLS_KEY, value: /etc/penstock/tls/tls.key}
- {name: PENSTOCK_TLS_CA, value: /etc/penstock/tls/ca.crt}
{{- else if .Values.insecure }}
- {name: PENSTOCK_INSECURE, value: "true"}
{{- else }}
{{- fail "tls.enabled is false: plain text between the services must be asked for with insecure: true" }}
{{- end }}
- {name: PENSTOCK_CONFIG, value: /etc/penstock/config/penstock.toml}
{{- with .Values.otlp.endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
- {name: OTEL_EXPORTER_OTLP_INSECURE, value: {{ hasPrefix "https:" . | not | quote }}}
{{- end }}
{{- end -}}

{{- define "penstock.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: config, mountPath: /etc/penstock/config, readOnly: true}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/penstock/tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "penstock.volumes" -}}
- {name: tmp, emptyDir: {}}
- name: config
  configMap: {name: {{ include "penstock.fullname" . }}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "penstock.tlsSecret" . }}
    # Read by the group of fsGroup, nobody else.
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "penstock.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "penstock.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Whether the process of a gRPC service lives: (list $ service port). The kubelet cannot show a certificate, so with TLS
     the service asks itself. */}}
{{- define "penstock.grpcHealth" -}}
{{- if (index . 0).Values.tls.enabled }}
exec: {command: [python3, -m, services.health, --live, {{ index . 1 }}, "127.0.0.1:{{ index . 2 }}"]}
timeoutSeconds: 5
{{- else }}
grpc: {port: {{ index . 2 }}}
timeoutSeconds: 4
{{- end }}
{{- end -}}

{{/* Whether the queue takes changes: (list $). For readiness alone: one whose disk does not answer is not mended by a restart. */}}
{{- define "penstock.queueTakesChanges" -}}
{{- if (index . 0).Values.tls.enabled }}
exec: {command: [python3, -m, services.health, queue, "127.0.0.1:7410"]}
timeoutSeconds: 5
{{- else }}
grpc: {port: 7410, service: penstock.queue.v1.QueueService}
timeoutSeconds: 4
{{- end }}
{{- end -}}

{{/* How the gateway is asked: (list $ path). `/health` also asks the queue, and is for readiness alone: a gateway whose
     queue is away is not mended by a restart, which would end the answers it still owes. */}}
{{- define "penstock.httpHealth" -}}
{{- if (index . 0).Values.tls.enabled }}
exec: {command: [python3, -m, services.health, gateway, "http://127.0.0.1:7415{{ index . 1 }}"]}
timeoutSeconds: 5
{{- else }}
httpGet: {path: {{ index . 1 }}, port: http}
timeoutSeconds: 4
{{- end }}
{{- end -}}

{{/* What the pods of all services have in common: (list $ component values-of-it). */}}
{{- define "penstock.podMeta" -}}
{{- $root := index . 0 -}}
labels:
  {{- include "penstock.labels" $root | nindent 2 }}
  app.kubernetes.io/component: {{ index . 1 }}
annotations:
  # Channels are taken up by what runs; anything else of the file at a start.
  checksum/config: {{ $root.Values.config | sha256sum }}
  {{- with (index . 2).podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "penstock.podSpec" -}}
{{- $root := index . 0 -}}
{{- $it := index . 1 -}}
serviceAccountName: {{ include "penstock.fullname" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- include "penstock.podSecurity" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $it.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name, image and security of a container: (list $ component image-name). */}}
{{- define "penstock.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: "{{ $root.Values.image.registry }}/{{ index . 2 }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}"
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  {{- include "penstock.containerSecurity" $root | nindent 2 }}
{{- end -}}
